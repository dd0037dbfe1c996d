"""What forward read is what backward has, though it was written to since: plain torch's gradients.

The Inductor backend of torch 2.13 fails "scaled", "one graph", "queue" and "averaged".
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw
from tests.ranks import run_ranks


class Writes(nn.Module):
    """Reads a buffer, or a tensor that it is given, and writes to it; `how` says in which way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("queue", torch.linspace(-1, 1, 24).view(4, 6))

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        q = self.linear(x)
        if self.how == "scaled":
            with torch.no_grad():
                self.scale.mul_(1.5)
            return (q * self.scale.mean().log2()).square().sum()
        if self.how == "averaged":  # as codebooks do; torch loses `alpha`
            with torch.no_grad():
                self.queue.mul_(0.9).add_(q.T @ F.normalize(x @ self.queue, dim=0), alpha=0.1)
            return (q @ self.queue).square().sum()
        keys = given if self.how == "given" else self.queue
        if self.how == "normalised":
            found = q @ F.normalize(keys, dim=0)
        else:
            found = q @ keys.clone()
        if self.how != "one graph":
            torch._dynamo.graph_break()
        with torch.no_grad():  # as MoCo does
            keys[:, 2:4] = q[:2].detach().T
        return found.square().sum()


def _train(how: str, stage: int, options: dict[str, Any]) -> None:
    pair = Pair(Writes(how), stage, {**options, "broadcast_buffers": False}, lr=0.01, rtol=1e-4)
    pair.train(lambda run, number: run(draw(3, 4, seed=number), draw(4, 6, seed=number + 10)))


@pytest.mark.parametrize(
    ("how", "stage", "options"),
    [
        *((how, 0, INDUCTOR) for how in ("scaled", "queue", "one graph", "averaged")),
        *((how, 3, EAGER) for how in ("scaled", "queue", "one graph", "normalised", "given")),
    ],
)
def test_backward_has_what_forward_read(how: str, stage: int, options: dict[str, Any]) -> None:
    run_ranks(2, _train, how, stage, options)
