"""What a loop puts aside, restores, replaces or moves, and what an exception leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zerofx
from tests.contract.loops import compiled, config, data, net, twin
from tests.hard.pair import EAGER, Pair, draw
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


def _restored(stage: int, how: str) -> None:
    model = net()
    ddp, run = twin(model), compiled(model, stage)
    run(*data(0))
    losses: list[list[float]] = []
    for trained, call in ((model, run), (ddp.module, ddp.module)):
        named = dict(trained.named_parameters())
        aside = (
            trained.state_dict()
            if how == "state_dict"
            else {
                name: param.detach() if how == "detach" else param.data
                for name, param in named.items()
            }
        )
        found: list[float] = []
        for scale in (0.5, None):
            for name, param in named.items():
                param.data = scale * param.data if scale else aside[name]
            with torch.no_grad():
                found.append(call(*data(1)).item())
        losses.append(found)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)


@pytest.mark.parametrize("how", ["data", "detach", "state_dict"])
@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_are_put_aside(stage: int, how: str) -> None:
    run_ranks(2, _restored, stage, how)


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))


def _replaced(stage: int) -> None:
    pair = Pair(_stack(), stage, {**EAGER, "accumulate": 2})
    pair.backward(lambda run, number: run(draw(4, 7, seed=number)).square().mean(), 0)
    for param in pair.model.parameters():
        param.grad = torch.zeros_like(param) if param.grad is None else param.grad * 0.5
    with pytest.raises(UnsupportedError, match="replaced, while it is held back"):
        pair.backward(lambda run, number: run(draw(4, 7, seed=number)).square().mean(), 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_replaced_while_it_is_held_back(stage: int) -> None:
    run_ranks(2, _replaced, stage)


def _raises_in_the_last_micro_batch(stage: int) -> None:
    model = _stack()
    run = torch.compile(model, backend=f"zero{stage}", options={**EAGER, "accumulate": 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failing = False

    def look(_: Tensor) -> None:
        if failing:
            raise FloatingPointError

    for step in range(4):
        try:
            for part in range(2):
                failing = step == 1 and part == 1
                run(draw(4, 7, seed=2 * step + part)).square().mean().backward()
            optimizer.step()
        except FloatingPointError:
            assert step == 1
        optimizer.zero_grad()
        if step == 0:
            model[0].weight.register_post_accumulate_grad_hook(look)


@pytest.mark.parametrize("stage", [0, 1])
def test_an_exception_in_the_last_micro_batch(stage: int) -> None:
    run_ranks(2, _raises_in_the_last_micro_batch, stage)


class _OneRow(nn.Module):
    """Rank 1 has no row of the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.last = nn.Parameter(torch.randn(1, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.place).square().mean()


def _seen_by_all(stage: int, folder: Path) -> None:
    model = zerofx.shard(_OneRow(), config(stage, min_shard_numel=0))
    run, x = torch.compile(model, backend=f"zero{stage}"), torch.ones(1, 8)
    with torch.no_grad():
        want = run(x).item()
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        for param in model.parameters():
            param.zero_()
        assert run(x).item() == 0
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        assert run(x).item() == want
        model._apply(lambda value: value.clone())  # as .cpu() and .cuda() again
        assert run(x).item() == want


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_without_rows_see_what_others_read_and_move(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _seen_by_all, stage, tmp_path)
