"""What the captured forward may not do is refused by name, whatever the stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hard.pair import EAGER, STAGES, full, same
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


class Counts(nn.Module):
    """Adds up what it sees, as running losses and scales of averages are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.sum())  # pyright: ignore[reportCallIssue]
        return self.linear(x).sum()


def test_numbers_that_torch_forgets_to_write() -> None:
    """torch before 2.15 compiles, and leaves them as they were."""
    (message,) = run_ranks(1, _refused, Counts, "", 3)
    assert "total" in message if torch.__version__ < "2.15" else not message


def _put() -> str:
    model = nn.Linear(6, 4)
    run: Any = torch.compile(model, backend="zero3", options=EAGER)
    run(torch.ones(3, 6))
    values = {f"_orig_mod.{name}": 0.9 * param for name, param in model.named_parameters()}
    with pytest.raises(Exception, match="functional_call") as error:
        torch.func.functional_call(run, values, (torch.ones(3, 6),))
    return str(error.value)


def test_other_tensors_in_the_place_of_parameters() -> None:
    for message in run_ranks(2, _put):
        assert "in the place of parameters" in message, message


class Given(nn.Module):
    """As MAML's learners: a weight of its own, or one that the loop computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 6))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight if weight is None else weight).square().mean()


def _given() -> str:
    model = Given()
    run = torch.compile(model, backend="zero3", options=EAGER)
    x = torch.full((3, 6), dist.get_rank() + 1.0)
    run(x).backward()
    before = full(model.weight.grad)
    with pytest.raises(Exception, match="full_tensor") as error:
        run(x, model.weight * 0.5)
    whole: Any = model.weight * 0.5
    run(x, whole.full_tensor()).backward()
    same(full(model.weight.grad), 1.25 * before, "a quarter is added", 1e-6)
    return str(error.value)


def test_what_is_computed_from_parameters_given_to_a_forward() -> None:
    for message in run_ranks(2, _given):
        assert "L_weight_" in message, message
