"""Graphs inside Dynamo's graph: nested compile regions, hooks in forward, branches, scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import zerofx
from tests.hard.pair import EAGER, Pair, draw, full, same
from tests.ranks import run_ranks


class Layer(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 9)
        self.down = nn.Linear(9, 6)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        def call(x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))

        return checkpoint(call, x, use_reentrant=False) if self.checkpointed else call(x)


@torch.compiler.nested_compile_region
def _run(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@torch.compiler.nested_compile_region
def _run_twice(layer: nn.Module, x: Tensor) -> Tensor:
    return _run(layer, _run(layer, x))


class Stack(nn.Module):
    """Layers as nested compile regions; some twice, in a region of their own."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(checkpointed) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = (_run_twice if place == 2 else _run)(layer, x)
        return x.square().mean()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)


class Hooked(Two):
    """Scales a gradient by a weight, in backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.register_hook(lambda grad: grad * self.second.weight.sum())
        return self.second(y).square().mean()


class Branched(Two):
    """Ranks run different branches, one inside another; one reads weights before."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.first.weight

        def inner(x: Tensor) -> Tensor:
            again = partial(checkpoint, self.first, use_reentrant=False)
            return torch.cond(x.mean() > 0.1, self.second, lambda x: again(x).sin(), (x,))

        y = torch.cond(x.sum() > 0, inner, lambda x: F.linear(self.second(x), first).cos(), (x,))
        return y.square().mean()


class Scanned(Two):
    """A recurrence, whose cell is read once."""

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.first(state) + row)
            return state, self.second(state)

        return scan(step, torch.zeros_like(x[0]), x)[1].square().mean()


class Mapped(Two):
    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = map_rows(lambda row: torch.tanh(self.second(row)), self.first(x))
        return rows.square().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "regions": lambda: Stack(False),
    "checkpointed": lambda: Stack(True),
    "hook": Hooked,
    "cond": Branched,
    "scan": Scanned,
    "map": Mapped,
}


def _train(kind: str, stage: int) -> None:
    pair = Pair(MODELS[kind](), stage, EAGER, rtol=1e-6)
    pair.train(lambda run, number: run(draw(4, 6, seed=number)))


@pytest.mark.parametrize(("kind", "stage"), [*zip(MODELS, (1, 3, 1, 3, 3, 2), strict=True)])
def test_graphs_inside_a_graph(kind: str, stage: int) -> None:
    run_ranks(2, _train, kind, stage)


class Biased(nn.Module):
    """A learned bias, read in the function of scores, and a scale before. (Not trained on CPUs.)"""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.randn(2, 64))
        self.scale = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        scale = self.scale

        def biased(score: Tensor, b: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return scale[head] * score + self.bias[head, row]

        return flex_attention(q, k, v, score_mod=biased)


def _infer() -> None:
    torch.manual_seed(0)
    plain, model = Biased(), Biased()
    model.load_state_dict(plain.state_dict())
    zerofx.shard(model, zerofx.ZeroConfig(stage=3, inner="eager", min_shard_numel=0))
    x = draw(1, 64, 16)
    with torch.no_grad():
        got = torch.compile(model, backend="zero3")(x)
        same(full(got), plain(x), "attention", rtol=1e-5)


def test_weights_in_a_function_of_scores() -> None:
    run_ranks(2, _infer)
