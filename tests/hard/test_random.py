"""Dropout draws what it draws without zerofx, checkpointed or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw, same
from tests.ranks import run_ranks


class Dropped(nn.Module):
    """Blocks with dropout, which backward may compute again."""

    def __init__(self, checkpointed: bool, depth: int = 2) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4), nn.Tanh()) for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.dropout(x, 0.3, self.training).square().mean()


def _loss(run: nn.Module, number: int) -> Tensor:
    return run(draw(5, 8, seed=number))


def _same_masks(stage: int, checkpointed: bool) -> None:
    """Bitwise equal losses and gradients, so equal masks, in forward and in recomputation."""
    pair = Pair(Dropped(checkpointed), stage)
    pair.train(_loss, 3)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_eager_dropout_is_the_plain_models(stage: int, checkpointed: bool) -> None:
    run_ranks(2, _same_masks, stage, checkpointed)


def _same_as_inductor() -> None:
    """One rank: the stream is that of `torch.compile(backend="inductor")`."""
    model = Dropped(checkpointed=True)
    want: list[Tensor] = []
    plain = torch.compile(model)
    for number in range(3):
        torch.manual_seed(number)
        model.zero_grad()
        loss = plain(draw(5, 8, seed=number))
        loss.backward()
        want += [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    torch._dynamo.reset()
    model.zero_grad()
    run = torch.compile(model, backend="zero3", options=INDUCTOR)
    got: list[Tensor] = []
    for number in range(3):
        torch.manual_seed(number)
        model.zero_grad()
        loss = run(draw(5, 8, seed=number))
        loss.backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        got += [loss.detach(), *(grad.full_tensor() for grad in grads)]
    for index, (one, other) in enumerate(zip(got, want, strict=True)):
        same(one, other, f"value {index}", 1e-5)


def test_inductor_dropout_is_plain_inductors() -> None:
    run_ranks(1, _same_as_inductor, timeout=220)


def _forward_and_backward_masks_agree(inner: str) -> None:
    """d(loss)/d(scale) is loss/scale only if backward repeats forward's masks."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((8, 1), 1.5))

        def _body(self, x: Tensor) -> Tensor:
            return F.dropout(x @ (self.scale * torch.eye(8)), 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self._body, x, use_reentrant=False).sum()

    model = Scaled()
    options = EAGER if inner == "eager" else INDUCTOR
    run = torch.compile(model, backend="zero3", options=options)
    for number in range(3):
        model.zero_grad()
        loss = run(draw(5, 8, seed=number))
        loss.backward()
        grad: Any = model.get_parameter("scale").grad
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        same(1.5 * grad.full_tensor().sum(), total / 2, "sum of gradients", 1e-4)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_checkpointed_masks_are_drawn_again(inner: str) -> None:
    run_ranks(2, _forward_and_backward_masks_agree, inner, timeout=220)
