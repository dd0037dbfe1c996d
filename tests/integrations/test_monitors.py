"""Figures of a run go where a file of DeepSpeed sends them."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zerofx
from tests.integrations.examples import BASE, nested
from zerofx.errors import MissingPackageError
from zerofx.integrations.deepspeed.report import StepReport


def test_figures_go_to_monitors(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"csv_monitor.enabled": True, "csv_monitor.output_path": str(tmp_path)}
    keys |= {"csv_monitor.job_name": "run", "fp16.enabled": True}
    recipe = zerofx.from_deepspeed(nested({**BASE, **keys}), world_size=2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    report = recipe.make_report(optimizer, recipe.make_scaler("cpu"))
    for loss in (3.0, 2.0):
        report.step(loss)
    samples = recipe.batch.train
    written = {path.name: path.read_text().split() for path in (tmp_path / "run").iterdir()}
    assert written == {
        "Train_Samples_lr.csv": ["step,lr", f"{samples},0.5", f"{2 * samples},0.5"],
        "Train_Samples_train_loss.csv": ["step,train_loss", f"{samples},3.0", f"{2 * samples},2.0"],
        "Train_Samples_loss_scale.csv": [
            "step,loss_scale",
            f"{samples},65536.0",
            f"{2 * samples},65536.0",
        ],
    }


def test_reports_of_a_run_that_is_resumed_go_on(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"csv_monitor.enabled": True, "csv_monitor.output_path": str(tmp_path)}
    keys |= {"csv_monitor.job_name": "run", "steps_per_print": 2}
    recipe = zerofx.from_deepspeed(nested({**BASE, **keys}), world_size=2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    lines: list[str] = []
    report = recipe.make_report(optimizer, recipe.make_scaler("cpu"), lines.append, steps=5)
    report.step()
    report.step()
    written = (tmp_path / "run" / "Train_Samples_lr.csv").read_text().split()
    assert written == ["step,lr", "24,0.5", "28,0.5"]
    assert len(lines) == 1 and lines[0].startswith("step=6, ")


@pytest.mark.parametrize(("monitor", "package"), [("wandb", "wandb"), ("comet", "comet_ml")])
def test_a_monitor_without_its_package_is_refused(monitor: str, package: str) -> None:
    if importlib.util.find_spec(package):
        pytest.skip("it is installed")
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        _report({f"{monitor}.enabled": True})


def test_comet_hears_of_every_so_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    comet = mock.MagicMock(__spec__=importlib.machinery.ModuleSpec("comet_ml", None))
    monkeypatch.setitem(sys.modules, "comet_ml", comet)
    keys = {"project": "ours", "mode": "create", "experiment_name": "run", "online": False}
    keys |= {"enabled": True, "samples_log_interval": 8}
    report = _report({f"comet.{name}": value for name, value in keys.items()})
    for loss in range(6):
        report.step(float(loss))
    comet.start.assert_called_once_with(project="ours", mode="create", online=False)
    experiment = comet.start.return_value
    experiment.set_name.assert_called_once_with("run")
    heard = [call for call in experiment.log_metric.call_args_list if "loss" in call.args[0]]
    # Steps of 4 samples: the first one is told, then every second one.
    assert [(call.args[1], call.kwargs["step"]) for call in heard] == [(0, 4), (2, 12), (4, 20)]


def _report(keys: dict[str, Any]) -> StepReport:
    recipe = zerofx.from_deepspeed(nested({**BASE, **keys}), world_size=2)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    return recipe.make_report(optimizer, recipe.make_scaler("cpu"))
