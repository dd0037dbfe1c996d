"""Figures of a run go where a file of DeepSpeed sends them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.integrations.examples import BASE, nested
from zerofx.errors import MissingPackageError


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


def test_a_monitor_without_its_package_is_refused() -> None:
    if importlib.util.find_spec("wandb"):
        pytest.skip("it is installed")
    recipe = zerofx.from_deepspeed(nested({**BASE, "wandb.enabled": True}), world_size=1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    with pytest.raises(MissingPackageError, match="pip install wandb"):
        recipe.make_report(optimizer, recipe.make_scaler("cpu"))
