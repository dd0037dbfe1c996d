"""Gradients that are weights: `autograd.Function`s give them, and nobody may write to those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw, full
from tests.ranks import run_ranks


class Times(torch.autograd.Function):
    """The sum of products, of which each gradient is the other operand itself."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return b, a


class Each(nn.Module):
    """The gradient of each of two weights is the other one; one lies otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(9, 9)) for _ in "ab")
        self.c = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(self.a, self.b.t()) + self.c(x).square().mean()  # type: ignore


class OfInput(nn.Module):
    """The gradient of the input is the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(9, 9))

    def forward(self, x: Tensor) -> Tensor:
        return Times.apply(x, self.a) + self.a.square().mean()  # type: ignore


def _of_weights(stage: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pair = Pair(Each(), stage, {**EAGER, **options}, rtol=1e-6)
    pair.train(lambda run, number: run(draw(4, 9, seed=number + 100 * dist.get_rank())), 3)


@pytest.mark.parametrize("options", [{}, {"bucket_bytes": 0}], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_of_other_weights(stage: int, options: dict[str, Any]) -> None:
    run_ranks(2, _of_weights, stage, options)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_other_weights_on_a_hybrid_mesh(stage: int) -> None:
    run_ranks(4, _of_weights, stage, {"replicate": 2})


def _of_inputs(stage: int, inner: str) -> None:
    torch.manual_seed(0)
    model = OfInput()
    run: Any = torch.compile(
        model, backend=f"zero{stage}", options=EAGER if inner == "eager" else INDUCTOR
    )
    x = draw(9, 9).requires_grad_()
    before = run(x)
    before.backward()
    assert x.grad is not None
    weight = full(model.a)
    assert torch.equal(x.grad, weight)
    x.grad.zero_()
    assert torch.equal(full(model.a), weight) and torch.equal(run(x), before)
    with torch.no_grad():
        model.a.mul_(2)
    assert not x.grad.any()


@pytest.mark.parametrize(
    ("stage", "inner"),
    [(0, "eager"), (1, "eager"), (2, "inductor"), (3, "eager"), (3, "inductor")],
)
def test_of_inputs_are_the_users_own(stage: int, inner: str) -> None:
    run_ranks(2, _of_inputs, stage, inner, timeout=120)
