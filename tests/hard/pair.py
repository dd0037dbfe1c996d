"""A sharded model beside a plain one: same weights, same batches, gradients averaged by hand.

The plain model is what DDP computes, with nothing in between: after each backward its gradients
are all-reduced and divided. With two ranks the sum has two terms, so equality is bitwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.device import DEVICE

STAGES = (0, 1, 2, 3)
EAGER = {"inner": "eager", "min_shard_numel": 0}
INDUCTOR = {"min_shard_numel": 0}

Loss = Callable[[Any, int], Tensor]


def full(value: Tensor | None) -> Any:
    """The global value of a tensor that may be sharded; every rank must call it."""
    if value is None:
        return None
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that depend on the rank and `seed`; the global random state is left alone."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(*shape, generator=generator).to(DEVICE)


def average(model: nn.Module) -> None:
    """What DDP does after a backward."""
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def descend(model: nn.Module, lr: float) -> None:
    """SGD by hand: zerofx's guard refuses an optimizer over gradients that it did not reduce."""
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.add_(param.grad, alpha=-lr)
            param.grad = None


def same(got: Tensor | None, want: Tensor | None, what: str, rtol: float = 0.0) -> None:
    """Assert equality, bitwise or relative to the largest entry."""
    assert (got is None) == (want is None), f"{what}: {got} instead of {want}"
    if got is None or want is None:
        return
    assert got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got} is not {want}"
    if got.numel():
        error = (got.double() - want.double()).abs().max().item()
        limit = rtol * want.double().abs().max().item()
        assert error <= limit, f"{what} differs by {error:.2e}, allowed {limit:.2e}"


def same_gradients(sharded: nn.Module, plain: nn.Module, rtol: float = 0.0) -> None:
    """Compare `.grad` of all parameters, presence included."""
    for (name, ours), theirs in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        same(full(ours.grad), full(theirs.grad), f"gradient of {name}", rtol)


def same_parameters(sharded: nn.Module, plain: nn.Module, rtol: float = 0.0) -> None:
    """Compare all parameters and buffers."""
    ours, theirs = sharded.state_dict(), plain.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same(full(value), full(theirs[name]), name, rtol)


class Pair:
    """The two models, and steps that compare them.

    Attributes:
        plain: the reference.
        model: the same weights; sharded from its first forward on.
        run: `model` compiled.
    """

    def __init__(
        self,
        model: nn.Module,
        stage: int,
        options: Mapping[str, Any] = EAGER,
        *,
        lr: float = 0.1,
        rtol: float = 0.0,
        **compile_options: Any,
    ) -> None:
        self.plain, self.model = copy.deepcopy(model), model
        self.rtol = rtol
        self.run: Any = torch.compile(
            model, backend=f"zero{stage}", options=dict(options), **compile_options
        )
        self.lr = lr
        self.optimizer = torch.optim.SGD(model.parameters(), lr=lr)

    def backward(self, loss: Loss, number: int = 0, **kwargs: Any) -> None:
        """Forward and backward of both with the same random state; losses are compared."""
        values: list[Tensor] = []
        for run in (self.run, self.plain):
            torch.manual_seed(number)
            value = loss(run, number)
            value.backward(**kwargs)
            values.append(value.detach())
        same(*values, f"loss {number}", self.rtol)

    def step(self) -> None:
        """Average, compare gradients, step both, compare parameters."""
        average(self.plain)
        same_gradients(self.model, self.plain, self.rtol)
        self.optimizer.step()
        self.optimizer.zero_grad()
        descend(self.plain, self.lr)
        same_parameters(self.model, self.plain, self.rtol)

    def train(self, loss: Loss, steps: Iterable[int] | int = 3) -> None:
        """Backward and step, several times."""
        for number in range(steps) if isinstance(steps, int) else steps:
            self.backward(loss, number)
            self.step()
