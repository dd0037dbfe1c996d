"""Accumulation over micro-batches: right by default, cheap when asked for."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.hard.pair import EAGER, STAGES, Pair, draw
from tests.hard.wire import watched
from tests.ranks import run_ranks
from zerofx.errors import ShardingError, UnreducedGradientError, UnsupportedError


class Sides(nn.Module):
    """A stem and two heads; a micro-batch uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 6)
        self.left, self.right = nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor, sides: str) -> Tensor:
        x = torch.tanh(self.stem(x))
        out = sum(getattr(self, side)(x) for side in sides.split())
        return out.square().mean()


_BOTH, _LEFT = "left right", "left"
_SCHEDULES = [[_BOTH] * 3, [_BOTH, _BOTH, _LEFT], [_BOTH, _LEFT, "right"]]


def _loss(sides: str) -> Any:
    return lambda run, number: run(draw(4, 7, seed=number), sides)


def _micro_batches(pair: Pair, sides: list[str], how: str, first: int) -> None:
    for index, side in enumerate(sides):
        last = index == len(sides) - 1
        held = how == "no_sync" and not last
        with zerofx.no_sync(pair.model) if held else contextlib.nullcontext():
            pair.backward(_loss(side), first + index)


def _accumulates(stage: int, hows: list[str]) -> None:
    options = {**EAGER, "accumulate": 3} if hows == ["accumulate"] else EAGER
    pair = Pair(Sides(), stage, options, rtol=1e-6)
    for turn, how in enumerate(hows):
        for number, sides in enumerate(_SCHEDULES, 10 * turn):
            _micro_batches(pair, sides, how, 10 * number)
            pair.step()


@pytest.mark.parametrize("hows", [["no_sync", "default"], ["accumulate"]], ids="-".join)
@pytest.mark.parametrize("stage", STAGES)
def test_micro_batches_add_up(stage: int, hows: list[str]) -> None:
    run_ranks(2, _accumulates, stage, hows)


def _gradient_calls(stage: int, hows: list[str]) -> list[int]:
    """Messages with gradients over three micro-batches, in each way."""
    alone = {**EAGER, "bucket_bytes": 0, "memory_budget": 0 if stage == 3 else None}
    options = {**alone, "accumulate": 3} if hows == ["accumulate"] else alone
    model = Sides()
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    calls = [0 for _ in hows]
    for turn, how in enumerate(hows):
        for index in range(3):
            held = how == "no_sync" and index < 2
            with zerofx.no_sync(model) if held else contextlib.nullcontext():
                loss = run(draw(4, 7), _BOTH)
                with watched() as wire:
                    loss.backward()
            calls[turn] += wire.count("isend")
        model.zero_grad()
    return calls


@pytest.mark.parametrize("stage", STAGES)
def test_stages_0_and_1_send_gradients_once(stage: int) -> None:
    # Six parameters; stage 3 gathers the two heads' weights again in each backward.
    gathers = 2 * 3 if stage == 3 else 0
    once, each = 6 * (1 if stage < 2 else 3) + gathers, 6 * 3 + gathers
    for hows, want in ((["default", "no_sync"], [each, once]), (["accumulate"], [once])):
        (calls, _) = run_ranks(2, _gradient_calls, stage, hows)
        assert calls == want, (hows, calls)


def _clears(stage: int, how: str, *settings: bool, **optimizer: bool) -> None:
    """`zero_grad` in the middle of an accumulation forgets what was held back."""
    options = {**EAGER, "accumulate": 2} if how == "accumulate" else EAGER
    pair = Pair(Sides(), stage, options, rtol=1e-6)
    pair.optimizer = torch.optim.SGD(pair.model.parameters(), lr=pair.lr, **optimizer)
    with torch.no_grad():
        pair.run(draw(4, 7), _BOTH)
    for number, set_to_none in enumerate(each for each in settings for _ in range(2)):
        with zerofx.no_sync(pair.model) if how == "no_sync" else contextlib.nullcontext():
            pair.backward(_loss(_BOTH), 10 * number)
        pair.optimizer.zero_grad(set_to_none=set_to_none)
        pair.plain.zero_grad(set_to_none=set_to_none)
        _micro_batches(pair, [_BOTH, _LEFT], how, 10 * number + 1)
        pair.step()


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
@pytest.mark.parametrize("stage", [0, 1])
def test_zero_grad_in_between(stage: int, how: str) -> None:
    run_ranks(2, _clears, stage, how, True, False)


@pytest.mark.parametrize(("stage", "how"), [(0, "accumulate"), (1, "no_sync")])
def test_zero_grad_of_foreach_optimizers(stage: int, how: str) -> None:
    run_ranks(2, _clears, stage, how, False, foreach=True)


class Reentrant(nn.Module):
    """Two regions checkpointed the old way, each of which runs a backward inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.first, x.requires_grad_(), use_reentrant=True)
        x = checkpoint(self.second, torch.tanh(x), use_reentrant=True)
        return x.square().mean()


def _reentrant(stage: int, hows: list[str]) -> str:
    options = {**EAGER, "accumulate": 2} if hows == ["accumulate"] else EAGER
    pair = Pair(Reentrant(), stage, options, rtol=1e-6)

    def loss(run: Any, number: int) -> Tensor:
        return run(draw(4, 7, seed=number))

    pair.run(draw(4, 7))
    for stance, how in itertools.product(("default", "force_eager"), hows):
        for number in range(4):
            held = how == "no_sync" and number % 2 == 0
            with (
                torch.compiler.set_stance(stance),
                zerofx.no_sync(pair.model) if held else contextlib.nullcontext(),
            ):
                try:
                    pair.backward(loss, number)
                except UnsupportedError as error:
                    return stance + str(error)
            if number % 2:
                pair.step()
    return ""


@pytest.mark.parametrize("hows", [["no_sync", "default"], ["accumulate"]], ids="-".join)
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_that_run_a_backward_of_their_own(stage: int, hows: list[str]) -> None:
    for message in run_ranks(2, _reentrant, stage, hows):
        if hows == ["accumulate"] and stage < 2:
            assert message.startswith("force_eager") and "use_reentrant=False" in message, message
        else:
            assert not message, message


def _steps_too_early(stage: int, how: str) -> str:
    options = {**EAGER, "accumulate": 2} if how == "accumulate" else EAGER
    pair = Pair(Sides(), stage, options, rtol=1e-6)
    with torch.no_grad():
        pair.run(draw(4, 7), _BOTH)
    with zerofx.no_sync(pair.model) if how == "no_sync" else contextlib.nullcontext():
        pair.backward(_loss(_BOTH), 0)
    try:
        pair.optimizer.step()
    except UnreducedGradientError as error:
        pair.optimizer.zero_grad()
        pair.plain.zero_grad()
        _micro_batches(pair, [_BOTH, _BOTH], how, 1)
        pair.step()
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_step_over_gradients_held_back_raises(stage: int, how: str) -> None:
    for message in run_ranks(2, _steps_too_early, stage, how):
        assert "held back" in message and "stem.weight" in message, message
        assert "where a step may have fewer" in message, message


def _never_sharded() -> str:
    plain = Sides()
    try:
        with zerofx.no_sync(plain):
            plain(draw(4, 7), _BOTH).backward()
    except ShardingError as error:
        return str(error)
    return ""


def test_no_sync_of_a_model_that_is_never_sharded_raises() -> None:
    for message in run_ranks(2, _never_sharded):
        assert "Sides is not sharded" in message, message


def _clips(how: str) -> None:
    """Clipping and loss scaling read `.grad` before any optimizer hook: it must be reduced."""
    for stage in STAGES:
        pair = Pair(Sides(), stage, rtol=1e-6)
        pair.backward(_loss(_BOTH), 0)
        for param in pair.plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (pair.model, pair.plain)]
        assert abs(float(norms[0].full_tensor()) / float(norms[1]) - 1) < 1e-6
        pair.step()


def test_gradients_are_reduced_when_backward_returns() -> None:
    run_ranks(2, _clips, "default")
