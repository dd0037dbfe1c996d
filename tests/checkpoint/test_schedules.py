"""Schedules write settings into groups of parameters; checkpoints carry them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, StepLR

from tests.contract.loops import FAST
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx import checkpoint


def _built() -> tuple[nn.Module, Any]:
    model = make("mlp", torch.float32)
    return model, torch.compile(model, backend="zero3", options=FAST)


def _optimizer(model: nn.Module) -> Optimizer:
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.02}, {"params": rest}]
    return AdamW(groups, lr=0.01)


def _train(run: Any, optimizer: Optimizer, schedule: LRScheduler, steps: range) -> list[float]:
    losses: list[float] = []
    for number in steps:
        loss = run(*batch("mlp", 0, number, torch.float32))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def _resumes(folder: Path) -> None:
    """The new schedule is built after the checkpoint was loaded, and continues the old one."""
    makers = {
        "step": lambda optimizer, last: StepLR(optimizer, 2, 0.5, last_epoch=last),
        "cycle": lambda optimizer, last: OneCycleLR(optimizer, 0.1, 20, last_epoch=last),
    }
    (model, run), (again, run_again) = _built(), _built()
    for name, make_schedule in makers.items():
        optimizer = _optimizer(model)
        _train(run, optimizer, make_schedule(optimizer, -1), range(3))
        checkpoint.save(folder / name, model, optimizer)
        resumed = _optimizer(again)
        assert "initial_lr" not in resumed.param_groups[0]
        checkpoint.load(folder / name, again, resumed)
        assert _settings(resumed) == _settings(optimizer)
        schedules = make_schedule(optimizer, 3), make_schedule(resumed, 3)
        wanted = _train(run, optimizer, schedules[0], range(3, 6))
        assert _train(run_again, resumed, schedules[1], range(3, 6)) == wanted
        assert _settings(resumed) == _settings(optimizer)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def test_a_schedule_built_after_loading_continues(tmp_path: Path) -> None:
    run_ranks(2, _resumes, tmp_path)
