"""World size 1: a mean is the gradient itself, which must be nobody else's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.hard.pair import EAGER, INDUCTOR, STAGES, full
from tests.ranks import run_ranks


class Twins(nn.Module):
    """Gradients that are equal, which compilers find out, and one that the user gives."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.given = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.one(x) + self.other(x.sin())), self.given + 0


def _apart(stage: int, inner: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = Twins()
    plain = copy.deepcopy(model)
    run = torch.compile(model, backend=f"zero{stage}", options=inner)
    given = torch.full((4, 8), 10.0)
    for _ in range(2):
        x = torch.randn(4, 8)
        for call in (run, plain):
            y, value = call(x)
            torch.autograd.backward([y.square().sum(), value], [None, given])
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(ours.grad), theirs.grad)
    assert torch.equal(given, torch.full((4, 8), 10.0))


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_share_no_memory(stage: int) -> None:
    run_ranks(1, _apart, stage, EAGER)


def test_gradients_of_inductor_share_no_memory() -> None:
    run_ranks(1, _apart, 3, INDUCTOR)
