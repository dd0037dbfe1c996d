"""A small model under zerofx beside its twin under DDP: same weights, same batches."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from tests.models import Batch, batch
from zerofx import ZeroConfig, ZeroFxError

STAGES = (0, 1, 2, 3)
FAST: dict[str, Any] = {"inner": "eager", "min_shard_numel": 0}


class Net(nn.Module):
    """Uneven on two ranks; `last` may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.last: nn.Module = nn.Linear(13, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.first(x))), y)


def net(build: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    """A model with weights that depend on `seed` alone."""
    torch.manual_seed(seed)
    return build()


def config(stage: int, **options: Any) -> ZeroConfig:
    """Fast options for `zerofx.shard`."""
    return ZeroConfig(stage=stage, **{**FAST, **options})  # pyright: ignore[reportArgumentType]


def compiled(model: Any, stage: int, **kwargs: Any) -> Any:
    """`torch.compile` with fast options."""
    torch._dynamo.reset()
    return torch.compile(model, backend=f"zero{stage}", **{"options": FAST, **kwargs})


def twin(model: nn.Module) -> DistributedDataParallel:
    """A copy of a plain model under DDP: the oracle."""
    return DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)


def sgd(model: nn.Module) -> Optimizer:
    """The optimizer that both sides use unless a test is about another one."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module, **kwargs: Any) -> Optimizer:
    """With an eps that does not magnify rounding."""
    return AdamW(model.parameters(), lr=1e-2, eps=1e-3, **kwargs)


def data(number: int, rows: int = 4, dtype: torch.dtype = torch.float32) -> Batch:
    """This rank's batch."""
    return batch("mlp", dist.get_rank(), number, dtype, rows=rows)


def train(
    run: Callable[..., Tensor],
    optimizer: Optimizer,
    steps: Iterable[int] | int = 2,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Losses of the usual loop."""
    losses: list[float] = []
    for number in range(steps) if isinstance(steps, int) else steps:
        loss = run(*data(number, dtype=dtype))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trains_alike(run: Any, model: nn.Module, plain: nn.Module, rtol: float = 1e-6) -> None:
    """Train a sharded model and a plain one's twin; assert that they are equal then."""
    ddp = twin(plain)
    train(run, sgd(model))
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp, rtol)


def full(value: Tensor) -> Tensor:
    """The global value; every rank must call it."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value.clone()


def same(got: nn.Module, want: nn.Module, rtol: float = 1e-6) -> None:
    """Assert that parameters and buffers of a sharded model equal a plain one's (or DDP's)."""
    if isinstance(want, DistributedDataParallel):
        want = want.module
    ours, theirs = got.state_dict(), want.state_dict()
    assert ours.keys() == theirs.keys(), f"{list(ours)} is not {list(theirs)}"
    for name, value in ours.items():
        close(full(value), full(theirs[name]), name, rtol)


def close(got: Tensor, want: Tensor, what: str, rtol: float = 1e-6) -> None:
    """Assert near equality, relative to the largest entry."""
    torch.testing.assert_close(
        got, want, rtol=0, atol=rtol * max(1.0, want.abs().max().item()), msg=lambda m: what + m
    )


def sharded(model: nn.Module) -> bool:
    """Whether every parameter is a `DTensor`."""
    return all(isinstance(param, DTensor) for param in model.parameters())


@contextlib.contextmanager
def refused(*words: str, kind: type[ZeroFxError] = ZeroFxError) -> Iterator[None]:
    """Assert that the block raises zerofx's own error, a remedy in it, and these words."""
    with pytest.raises(kind) as caught:
        yield
    text = str(caught.value)
    missing = [word for word in (*words, "Remedy:") if word not in text]
    assert not missing, f"{missing} not in: {text}"


def still_plain(model: nn.Module, *inputs: Any) -> None:
    """A refusal lost nothing: the model runs forward and backward as it is."""
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    model(*(inputs or data(0))).backward()
    assert any(param.grad is not None for param in model.parameters())
    model.zero_grad()
