"""Full values in code that Dynamo leaves to Python: edits are not lost, identities hold."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hard.pair import EAGER, STAGES, Pair, draw, full, same
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


class Again(torch.autograd.Function):
    """A module, run once more in backward instead of keeping what it computed."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, saves: bool, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.module, ctx.saves = module, saves
        ctx.save_for_backward(x, *(weights if saves else ()))
        ctx.weights = () if saves else weights
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, *saved = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inputs = (x, *(saved if ctx.saves else ctx.weights))
            found = torch.autograd.grad(ctx.module(x), inputs, grads[0], allow_unused=True)
        return None, None, *found


class Reversible(nn.Module):
    """Runs one layer twice, for which plain torch has one tensor a weight."""

    def __init__(self, saves: bool) -> None:
        super().__init__()
        self.first, self.layer, self.saves = nn.Linear(6, 8), nn.Linear(8, 8), saves

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = Again.apply(self.layer, self.saves, x, self.layer.weight, self.layer.bias)
        return x.square().mean()


def _runs_again(stage: int, saves: bool) -> None:
    Pair(Reversible(saves), stage, rtol=1e-6).train(lambda run, n: run(draw(5, 6, seed=n)))


@pytest.mark.parametrize(
    ("stage", "saves"), [*((stage, True) for stage in STAGES), (1, False), (3, False)]
)
def test_functions_that_run_a_module_again_in_backward(stage: int, saves: bool) -> None:
    run_ranks(2, _runs_again, stage, saves)


def _assign(weight: Tensor) -> None:
    weight.data = 0.5 * weight


def _set_rows(weight: Tensor) -> None:
    weight.data[1:] = 0.5


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda weight: weight.mul_(0.5),
    "data": lambda weight: weight.data.mul_(0.5),
    "data assigned": _assign,
    "rows": _set_rows,
    "list": lambda weight: torch._foreach_mul_([weight.data], 0.5),
    "init": nn.init.ones_,
    "view": lambda weight: weight.t()[1:3].zero_(),
}


class Untraced(nn.Module):
    """Writes to a weight where Dynamo does not look."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(16, 16), how

    @torch.compiler.disable
    def write(self) -> None:
        with torch.no_grad():
            WRITES[self.how](self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        self.write()
        return self.linear(x).square().mean()


def _loss(run: nn.Module, number: int) -> Tensor:
    return run(draw(3, 16, seed=number))


def _refused(model: nn.Module, stage: int) -> None:
    """At the optimizer's step at the latest."""
    run = torch.compile(model, backend=f"zero{stage}", options=EAGER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"in place[\s\S]*linear\.weight"):
        _loss(run, 0).backward()
        optimizer.step()


def _written(stage: int, how: str) -> None:
    model = Untraced(how)
    if stage in (1, 2) and how != "data assigned":
        # A resident copy has the rank's own rows in it.
        Pair(model, stage, rtol=1e-6).train(_loss, 2)
    else:
        _refused(model, stage)


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_writes_where_dynamo_does_not_look(stage: int, how: str) -> None:
    run_ranks(2, _written, stage, how)


class Broken(nn.Module):
    """Writes, after a graph break, to a value that was read before it."""

    def __init__(self, through_data: bool) -> None:
        super().__init__()
        self.linear, self.through_data = nn.Linear(16, 16), through_data

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        torch._dynamo.graph_break()
        with torch.no_grad():
            (weight.data if self.through_data else weight).mul_(2.0)
        return self.linear(x).square().mean()


@pytest.mark.parametrize(("stage", "through_data"), [(0, False), (1, True), (3, False), (3, True)])
def test_writes_after_a_graph_break(stage: int, through_data: bool) -> None:
    run_ranks(2, _refused, Broken(through_data), stage)


class Reads(nn.Module):
    """Reads only, in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.seen: list[Tensor] = []

    @torch.compiler.disable
    def look(self) -> Tensor:
        weight = self.linear.weight
        with torch.no_grad():
            self.seen = [
                copy.deepcopy(weight.detach()),
                pickle.loads(pickle.dumps(weight.data)),
                weight.data.clone().mul_(1.0),
                torch.cat([row.cpu() for row in weight.data]).view(16, 16),
                torch.from_numpy(weight.data.numpy().copy()),
                nn.Parameter(weight.clone()).data,
            ]
        return weight * torch.ones_like(weight)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.look() + self.linear(x)).square().mean()


def _read(stage: int) -> None:
    pair = Pair(Reads(), stage, rtol=1e-6)
    before = full(pair.model.linear.weight.detach()).clone()
    pair.backward(_loss)
    for place, seen in enumerate(pair.model.seen):
        assert type(seen) is Tensor
        same(seen, before, f"reading {place}")
    pair.step()


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_reads_where_dynamo_does_not_look(stage: int) -> None:
    run_ranks(2, _read, stage)


class Moved(nn.Module):
    """Assigns a weight to itself, as losses of pytorch-metric-learning do."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(16, 16), factor

    def forward(self, x: Tensor) -> Tensor:
        self.linear.weight.data = self.linear.weight.data.to(x.device, x.dtype)
        if self.factor != 1.0:
            self.linear.weight.data = self.factor * self.linear.weight.data
        return self.linear(x).square().mean()


def _moved(stage: int) -> None:
    Pair(Moved(1.0), stage, rtol=1e-6).train(_loss, 2)
    _refused(Moved(0.5), stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_weight_assigned_to_itself(stage: int) -> None:
    run_ranks(2, _moved, stage)
