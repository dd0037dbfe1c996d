"""Stage 3: nothing that autograd saves is as large as a weight (pitfalls A7 and A8)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw
from tests.ranks import run_ranks

WIDTH = 48
"""Weights have 2304 elements and their shards 1152; activations of 2 rows have 96."""


class Low(nn.Module):
    """LoRA's merge: a frozen weight plus a product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(WIDTH, 4))
        self.b = nn.Parameter(0.1 * torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.base.weight + self.a @ self.b, self.base.bias)


class Standardised(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight / (weight.std(1, keepdim=True) + 1e-4), self.bias)


class Fused(nn.Module):
    """Three weights as one, and a mixture over the rows of a fourth."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.mix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([part.weight for part in self.parts])
        q, k, v = F.linear(x, weight).chunk(3, -1)
        return torch.tanh(q * k + v) @ self.mix.softmax(0)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _plain() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Two blocks, checkpointed or not, under autocast or not."""

    def __init__(self, block: Callable[[], nn.Module], checkpointed: bool, autocast: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.checkpointed, self.autocast = checkpointed, autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
                x = torch.tanh(x)
        return x.float().square().mean()


def _saved_by(forward: Callable[[], Tensor]) -> list[tuple[int, ...]]:
    """Shapes of what a forward saves for its backward, which runs, too."""
    saved: list[tuple[int, ...]] = []

    def keep(value: Tensor) -> Tensor:
        saved.append(tuple(value.shape))
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        value = forward()
    value.backward()
    return saved


def _saves(name: str, inner: str, checkpointed: bool, autocast: bool) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    options, rtol = (EAGER, 1e-5) if inner == "eager" else (INDUCTOR, 1e-4)
    block = {
        "plain": _plain,
        "lora": Low,
        "standardised": lambda: Standardised(WIDTH, WIDTH),
        "fused": Fused,
        "weight_norm": Normed,
    }[name]
    pair = Pair(Stack(block, checkpointed, autocast), 3, options, rtol=2e-2 if autocast else rtol)

    def loss(run: nn.Module, number: int) -> Tensor:
        return run(draw(2, WIDTH, seed=number))

    pair.train(loss, 2)
    return _saved_by(lambda: loss(pair.run, 0))


CASES = ["plain", "lora", "standardised", "fused", "weight_norm"]


@pytest.mark.parametrize(("checkpointed", "autocast"), [(False, False), (True, True)])
@pytest.mark.parametrize("name", CASES)
def test_no_full_weight_is_saved(name: str, checkpointed: bool, autocast: bool) -> None:
    for saved in run_ranks(2, _saves, name, "eager", checkpointed, autocast):
        assert saved, "nothing was looked at"
        large = [shape for shape in saved if torch.Size(shape).numel() > WIDTH * WIDTH // 2]
        assert not large, large


class Positions(nn.Module):
    """A matrix made of a weight alone, of which a number that is no constant says how much."""

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.table, self.counted = nn.Parameter(torch.randn(WIDTH, WIDTH)), counted

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[1]
        if self.counted:
            rows = int((x[0, :, 0] < 9).sum().item())
            torch._check(rows >= 1)
            torch._check(rows <= WIDTH)
        rest = self.table.narrow(0, 0, rows).square().sum() / WIDTH**2
        mixed = torch.softmax(torch.sin(self.table[: x.shape[1]] @ self.table), -1)
        return (x.transpose(1, 2) @ mixed).square().mean() + rest


def _dynamic(counted: bool) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        pair = Pair(Positions(counted), 3, EAGER, rtol=1e-5, dynamic=True)
        for length in (WIDTH - 8, WIDTH - 3):
            pair.train(lambda run, number, n=length: run(draw(2, n, 3, seed=number)), 1)
        return _saved_by(lambda: pair.run(draw(2, WIDTH - 5, 3)))


@pytest.mark.parametrize("counted", [False, True])
def test_no_value_of_weights_and_sizes_is_saved(counted: bool) -> None:
    for saved in run_ranks(2, _dynamic, counted):
        large = [shape for shape in saved if torch.Size(shape).numel() > WIDTH * WIDTH // 2]
        assert saved and not large, large


def test_no_full_weight_is_saved_through_inductor() -> None:
    for saved in run_ranks(2, _saves, "lora", "inductor", True, True, timeout=220):
        large = [shape for shape in saved if torch.Size(shape).numel() > WIDTH * WIDTH // 2]
        assert saved and not large, large
