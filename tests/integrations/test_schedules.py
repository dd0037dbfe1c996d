"""Learning rates and momenta are DeepSpeed's, step by step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.integrations.record_deepspeed import RECORD, STEPS, two_groups
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.schedules import SHAPES, Schedule

RECORDED = json.loads(RECORD.read_text())["schedules"]


def _make(optimizer: torch.optim.Optimizer, name: str, params: dict[str, Any]) -> Schedule:
    return Schedule(optimizer, SHAPES[name](**params))


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_rates_and_betas_are_recorded_ones(number: int) -> None:
    recorded = RECORDED[number]
    optimizer = two_groups()
    schedule = _make(optimizer, recorded["type"], recorded["params"])
    for step in range(STEPS):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates == pytest.approx(recorded["lrs"][step], rel=1e-12, abs=0), step
        assert schedule.get_last_lr() == rates
        betas = recorded["betas"][step] if "betas" in recorded else [0.9, 0.999]
        assert list(optimizer.param_groups[1]["betas"]) == pytest.approx(betas)
        optimizer.step()
        schedule.step()


def test_a_schedule_goes_on_where_it_was_saved(tmp_path: Any) -> None:
    recorded = RECORDED[5]
    optimizer = two_groups()
    schedule = _make(optimizer, recorded["type"], recorded["params"])
    for _ in range(9):
        optimizer.step()
        schedule.step()
    torch.save(schedule.state_dict(), tmp_path / "schedule.pt")
    other = two_groups()
    resumed = _make(other, recorded["type"], recorded["params"])
    resumed.load_state_dict(torch.load(tmp_path / "schedule.pt", weights_only=True))
    other.step()
    resumed.step()
    assert resumed.get_last_lr() == pytest.approx(recorded["lrs"][10])


def test_a_schedule_goes_on_from_a_step() -> None:
    recorded = RECORDED[5]
    optimizer = two_groups()
    before = [group["lr"] for group in optimizer.param_groups]
    schedule = Schedule(optimizer, SHAPES[recorded["type"]](**recorded["params"]), 8)
    assert [group["lr"] for group in optimizer.param_groups] == before == schedule.get_last_lr()
    optimizer.step()
    schedule.step()
    assert schedule.get_last_lr() == pytest.approx(recorded["lrs"][10])


def test_betas_stay_where_a_schedule_goes_on() -> None:
    optimizer = two_groups()
    cycle = SHAPES["OneCycle"](cycle_min_lr=0.1, cycle_max_lr=0.2)  # pyright: ignore[reportCallIssue]
    schedule = Schedule(optimizer, cycle, 8)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.9, 0.999)] * 2
    optimizer.step()
    schedule.step()
    assert [group["betas"][1] for group in optimizer.param_groups] == [0.99] * 2


def test_what_does_not_fit_the_optimizer_is_refused() -> None:
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(ConfigError, match="betas, which SGD has not"):
        _make(sgd, "OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2})
    with pytest.raises(ConfigError, match="2 values for 1 parameter groups"):
        _make(sgd, "WarmupLR", {"warmup_max_lr": [0.1, 0.2]})
