"""A step between a forward and its backward: refused where torch refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import zerofx
from tests.contract.loops import compiled, data, net
from tests.hard.pair import Pair, average, draw, same_parameters
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import UnsupportedError


def _steps_between(stage: int, foreach: bool) -> str:
    model = net()
    run = compiled(model, stage)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    first, second = run(*data(0)), run(*data(1))
    first.backward()
    optimizer.step()
    with pytest.raises(UnsupportedError) as error:
        second.backward()
    run(*data(2)).backward()
    return str(error.value)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_backward_refuses_other_weights_than_its_forward_read(stage: int, foreach: bool) -> None:
    for said in run_ranks(2, _steps_between, stage, foreach):
        assert "between a forward and its backward" in said and "last.weight" in said
        assert "first.weight" not in said  # whose values no gradient depends on


def _through_unshard(model: nn.Module) -> None:
    with zerofx.unshard(model) as values:
        values["last.weight"].add_(1)


EDITS: dict[str, Callable[[Any], Any]] = {
    "data": lambda model: setattr(model.last.weight, "data", 2 * model.last.weight.data),
    "what data shows": lambda model: model.last.weight.data.mul_(2),
    "in place": lambda model: model.last.weight.mul_(2),
    "rows": lambda model: model.last.weight[1].zero_(),
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 2.0),
    "state dict": lambda model: model.load_state_dict(net().state_dict()),
    "vector": lambda model: vector_to_parameters(
        2 * parameters_to_vector(model.parameters()), model.parameters()
    ),
    "unshard": _through_unshard,
}


def _edits_between(stage: int) -> None:
    """Refused by zerofx, or by torch, which sees writes to rows; at no stage a wrong gradient."""
    model = net()
    run = compiled(model, stage)
    run(*data(0)).backward()
    for edit in EDITS.values():
        first, second = run(*data(0)), run(*data(1))
        with torch.no_grad():
            edit(model)
        third = run(*data(1))
        for loss in (first, second):
            with pytest.raises((UnsupportedError, RuntimeError), match=r"last\.weight|inplace"):
                loss.backward()
        third.backward()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_edits_between_a_forward_and_its_backward(stage: int) -> None:
    run_ranks(2, _edits_between, stage)


def _saves_between(stage: int, folder: Path) -> None:
    """DCP steps with a rate of zero to make an optimizer's state."""
    model = net()
    run, optimizer = compiled(model, stage), torch.optim.AdamW(model.parameters())
    loss = run(*data(0))
    checkpoint.save(folder / "saved", model, optimizer)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_is_no_step(stage: int, tmp_path: Path) -> None:
    run_ranks(2, _saves_between, stage, tmp_path)


class Parts(nn.Module):
    """Two parts in one model, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(7, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.one(x)
        loss = hidden.square().mean()
        torch._dynamo.graph_break()  # one program has one backward
        return loss, self.other(hidden.detach()).square().mean()


def _in_turn(stage: int) -> None:
    """The first part steps before the second one's backward, which reads nothing of it."""
    pair = Pair(Parts(), stage)
    for run in (pair.run, pair.plain):
        for loss, part in zip(run(draw(4, 7)), ("one", "other"), strict=True):
            loss.backward()
            params = list(getattr(run, part).parameters())
            if run is pair.plain:
                average(getattr(run, part))
            optimizer = torch.optim.SGD(params, lr=0.1)
            zerofx.trust(optimizer)
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(pair.model, pair.plain)


@pytest.mark.parametrize("stage", [0, 3])
def test_parts_step_in_turn(stage: int) -> None:
    run_ranks(2, _in_turn, stage)
