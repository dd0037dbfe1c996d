"""Scales are those of DeepSpeed's scaler, step by step, and all ranks skip together."""

from __future__ import annotations

import dataclasses
import functools
import json
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerofx
from tests.hard.pair import full
from tests.integrations.record_deepspeed import RECORD, SCALER_DEFAULTS
from tests.ranks import run_ranks
from zerofx.errors import ConfigError, LossScaleError
from zerofx.runtime.loss_scale import FixedScaler, GradScaler

RECORDED = json.loads(RECORD.read_text())["scalers"]
_NAMES = {"scale_window": "window", "delayed_shift": "hysteresis"}


def _scaler(options: dict[str, Any]) -> GradScaler:
    named = {_NAMES.get(key, key): value for key, value in {**SCALER_DEFAULTS, **options}.items()}
    return GradScaler("cpu", **named)


class _Steps:
    """One parameter, whose gradient is 1 or overflows."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.param = nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0)
        self.scaler = scaler

    def take(self, overflows: bool) -> bool:
        """Whether the parameter moved."""
        before = self.param.item()
        self.scaler.scale(self.param * (torch.inf if overflows else 1.0)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.param.item() != before


@pytest.mark.parametrize("number", range(len(RECORDED)))
def test_scales_are_recorded_ones(number: int) -> None:
    recorded = RECORDED[number]
    scaler = _scaler(recorded["options"])
    steps = _Steps(scaler)
    pairs = zip(recorded["steps"], recorded["scales"], strict=False)
    for position, (step, scale) in enumerate(pairs):
        assert steps.take(step == "x") == (step == ".")
        assert scaler.skipped == (step == "x")
        assert scaler.get_scale() == scale, position
    if len(recorded["scales"]) < len(recorded["steps"]):
        with pytest.raises(LossScaleError, match="lowest loss scale"):
            steps.take(True)


def test_a_scaler_goes_on_where_it_was_saved() -> None:
    recorded = RECORDED[2]
    steps = _Steps(_scaler(recorded["options"]))
    for step in recorded["steps"][:11]:
        steps.take(step == "x")
    resumed = _scaler(recorded["options"])
    resumed.load_state_dict(steps.scaler.state_dict())
    copied = pickle.loads(pickle.dumps(steps.scaler))
    for other in (resumed, copied):
        follow = _Steps(other)
        for step, scale in zip(recorded["steps"][11:], recorded["scales"][11:], strict=True):
            follow.take(step == "x")
            assert other.get_scale() == scale


def test_a_scale_stays_finite_and_fixed_ones_stay() -> None:
    growing = _Steps(GradScaler("cpu", 2.0**127, window=1))
    fixed = _Steps(FixedScaler("cpu", 8.0))
    for _ in range(3):
        growing.take(False)
        assert not fixed.take(True) and fixed.take(False)
    assert growing.scaler.get_scale() == 2.0**127 and fixed.scaler.get_scale() == 8.0


def test_without_being_enabled_it_does_nothing() -> None:
    steps = _Steps(GradScaler("cpu", enabled=False))
    assert steps.take(False) and steps.scaler.get_scale() == 1.0
    assert steps.scaler.state_dict() == {}


@pytest.mark.parametrize("wrong", [{"window": 0}, {"hysteresis": 0}, {"min_scale": 2.0**17}])
def test_arguments_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GradScaler("cpu", **wrong)


class _Mixed(nn.Module):
    """A replicated parameter, which is never infinite, comes before a sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.ones(2))
        self.large = nn.Parameter(torch.ones(8, 4))

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        return self.small.sum() + (self.large.float() * weights).sum()


def _scaled(*, fused: bool, ours: bool) -> tuple[Any, Any]:
    """What makes an optimizer, and a scaler."""
    make = FixedScaler if ours else torch.amp.GradScaler
    return functools.partial(torch.optim.SGD, lr=1.0, fused=fused), make("cpu", 1.0)


def _overflow_of_one_rank(
    row: int, fused: bool = False, ours: bool = True, low: Any = torch.bfloat16
) -> tuple[list[float], list[bool]]:
    model, plain = _Mixed(), torch.zeros((), requires_grad=True)
    config = zerofx.ZeroConfig(
        inner="eager", min_shard_numel=8, param_dtype=low, cast_forward_inputs=False
    )
    zerofx.shard(model, config)
    run: Any = torch.compile(model, backend="zero3", options={"config": config})
    make, scaler = _scaled(fused=fused, ours=ours)
    optimizer, skipped = make([*model.parameters(), plain]), []
    for bad in (False, True):
        weights = torch.ones(8, 4)
        if bad:
            weights[row] = torch.inf
        scaler.scale(run(weights) + plain).backward()
        before = plain.item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(plain.item() == before)
    return [full(p).sum().item() for p in model.parameters()], skipped


@pytest.mark.parametrize("row", [0, 7])
def test_an_overflow_in_bf16_on_one_rank_makes_all_skip(row: int) -> None:
    for sums, skipped in run_ranks(2, _overflow_of_one_rank, row):
        assert sums == [0.0, 0.0] and skipped == [False, True]


@pytest.mark.parametrize("low", [torch.bfloat16, None])
@pytest.mark.parametrize(("fused", "ours"), [(False, False), (True, False), (True, True)])
def test_so_do_torchs_scaler_and_fused_optimizers(fused: bool, ours: bool, low: Any) -> None:
    for sums, skipped in run_ranks(2, _overflow_of_one_rank, 7, fused, ours, low):
        assert sums == [0.0, 0.0] and skipped == [False, True]


def _overflow_beside_others() -> bool:
    """Ranks 1 and 2 have a model, of which 0 and 3 know nothing."""
    group = dist.new_group([1, 2])
    if dist.get_rank() not in (1, 2):
        return True
    assert isinstance(group, dist.ProcessGroup)
    model, mesh = _Mixed(), DeviceMesh.from_group(group, "cpu")
    config = zerofx.ZeroConfig(
        inner="eager", min_shard_numel=8, param_dtype=torch.bfloat16, cast_forward_inputs=False
    )
    zerofx.shard(model, dataclasses.replace(config, mesh=mesh))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), FixedScaler("cpu")
    weights = torch.ones(8, 4)
    weights[7] = torch.inf
    scaler.scale(model(weights)).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.skipped


def test_an_overflow_concerns_the_ranks_of_its_model() -> None:
    assert run_ranks(4, _overflow_beside_others) == [True] * 4


def _overflow_in_an_expert() -> tuple[bool, float]:
    """Each pair of ranks has an expert of its own, in the optimizer of what all have."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "rank"))
    dense, expert = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
    for model, mesh in ((dense, None), (expert, pairs["rank"])):
        zerofx.shard(model, zerofx.ZeroConfig(inner="eager", min_shard_numel=8, mesh=mesh))
    optimizer = torch.optim.SGD([*dense.parameters(), *expert.parameters()], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", 1.0)
    before, x = full(dense.weight), torch.ones(2, 8)
    scaled = expert(x) * (torch.inf if dist.get_rank() == 0 else 1.0)
    scaler.scale(dense(x).sum() + scaled.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return torch.equal(before, full(dense.weight)), scaler.get_scale()


def test_an_overflow_in_a_model_of_some_ranks_concerns_the_optimizer_on_all() -> None:
    assert run_ranks(4, _overflow_in_an_expert) == [(True, 0.5)] * 4
