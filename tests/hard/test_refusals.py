"""What the captured forward may not do is refused by name, whatever the stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hard.pair import EAGER, STAGES
from tests.ranks import run_ranks


class Writes(nn.Module):
    """Halves a weight on its way; `how` says through what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "whole":
                self.linear.weight.mul_(0.5)
            elif self.how == "view":
                self.linear.weight.t()[1:3].mul_(0.5)
            elif self.how == "parameters":
                next(self.parameters()).mul_(0.5)
            elif self.how == "data":
                self.linear.weight.data.mul_(0.5)
            elif self.how == "assigned":
                self.linear.weight.data = 0.5 * self.linear.weight
            elif self.how == "rows":
                self.linear.weight.data[:] = 0.5
            elif self.how == "list":
                torch._foreach_copy_([self.linear.weight], [torch.zeros(6, 6)])
            elif self.how == "list of data":
                torch._foreach_mul_([self.linear.weight.data], 0.5)
            elif self.how == "data of parameters":
                torch.relu_(next(self.parameters()).data)
        return self.linear(x).sum()


class Renormalised(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Embedding(8, 6, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.argmax(1)).sum()


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = Writes("whole")

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def _refused(build: Callable[[str], nn.Module], how: str, stage: int) -> str:
    model = build(how)
    run = torch.compile(model, backend=f"zero{stage}", options=EAGER)
    try:
        run(torch.ones(3, 6))
    except Exception as error:
        return str(error)
    return ""


_WRITES = [
    (Writes, "view"),
    (Writes, "parameters"),
    (Writes, "data"),
    (Writes, "assigned"),
    (Writes, "rows"),
    (Writes, "list"),
    (Writes, "list of data"),
    (Writes, "data of parameters"),
    (Renormalised, "max_norm"),
    (Checkpointed, "whole"),
]


@pytest.mark.parametrize(
    ("build", "how", "stage"),
    [
        *((Writes, "whole", stage) for stage in STAGES),
        *((build, how, stage) for build, how in _WRITES for stage in (1, 3)),
    ],
)
def test_writing_to_a_parameter_is_refused_by_name(
    build: Callable[[str], nn.Module], how: str, stage: int
) -> None:
    for message in run_ranks(2, _refused, build, how, stage):
        assert "in place" in message and "linear.weight" in message, message


def _sparse(stage: int) -> str:
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Linear(6, 4))
    run = torch.compile(model, backend=f"zero{stage}", options=EAGER)
    try:
        F.mse_loss(run(torch.arange(5)), torch.ones(5, 4)).backward()
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 3])
def test_sparse_gradients_are_refused_by_name(stage: int) -> None:
    for message in run_ranks(2, _sparse, stage):
        assert "sparse" in message and "0.weight" in message, message
