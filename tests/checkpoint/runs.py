"""A model with every sort of parameter, trained for a while, and its whole state to compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from tests.device import DEVICE
from tests.models import batch
from zerofx import ZeroConfig

OPTIONS: dict[str, Any] = {"inner": "eager", "min_shard_numel": 8}


class Everything(nn.Module):
    """Tied, frozen, uneven, empty, scalar, replicated and unused parameters in three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.tied, self.again = nn.Linear(13, 13), nn.Linear(13, 13, bias=False)
        self.again.weight = self.tied.weight
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.norm = nn.BatchNorm1d(13)
        self.fp64 = nn.Linear(13, 11, dtype=torch.float64)
        self.bf16 = nn.Linear(11, 5, dtype=torch.bfloat16)
        self.one_row = nn.Parameter(torch.randn(1, 13))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.unused = nn.Parameter(torch.randn(9, 2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([x, self.empty])
        x = torch.tanh(self.tied(torch.tanh(self.first(x))))
        x = self.norm(self.again(self.frozen(x)) + self.one_row)
        x = torch.tanh(self.fp64(x.double())).bfloat16()
        return F.mse_loss(self.bf16(x).float() * self.scale, y)


def sharded_by(stage: Any, **options: Any) -> ZeroConfig:
    """The options of a `Run`, for `zerofx.shard`."""
    return ZeroConfig(stage=stage, **{**OPTIONS, **options})


class Run:
    """A model, its compiled form and an optimizer, or several in its place."""

    def __init__(
        self,
        stage: int,
        seed: int = 0,
        build: Any = Everything,
        *,
        reset: bool = True,
        **options: Any,
    ) -> None:
        if reset:  # which the runs of before would be compiled anew after
            torch._dynamo.reset()
        torch.manual_seed(seed)
        self.stage = stage
        self.model: Any = build().to(DEVICE)
        self.step: Any = torch.compile(
            self.model, backend=f"zero{stage}", options={**OPTIONS, **options}
        )
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=1e-2, weight_decay=0.1)
        self.optimizers = [self.optimizer]

    def train(self, steps: Iterable[int]) -> list[float]:
        """Losses of the usual loop."""
        losses: list[float] = []
        for number in steps:
            loss = self.step(*batch("mlp", dist.get_rank(), number))
            loss.backward()
            losses.append(loss.item())
            for each in self.optimizers:
                each.step()
                each.zero_grad()
        return losses

    def only_update(self) -> None:
        """The optimizer's part of a step, without a program: gradients are the values."""
        for name, param in self.model.named_parameters():
            if param.requires_grad and name != "unused":
                param.grad = param.detach().clone()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @staticmethod
    def values(model: nn.Module) -> dict[str, Tensor]:
        """Full values of parameters and buffers, by name."""
        return {name: full(value) for name, value in model.state_dict().items()}

    def state(self) -> dict[str, Tensor]:
        """Full values of everything that a checkpoint holds, by name."""
        names = {id(param): name for name, param in self.model.named_parameters()}
        found = self.values(self.model)
        for param, entries in self.optimizer.state.items():
            for key, value in entries.items():
                found[f"{names[id(param)]}.{key}"] = full(value)
        return found


def full(value: Tensor) -> Tensor:
    """The global value, copied, or rank 0's; every rank must call it."""
    value = value.detach()
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    value = value.clone()
    dist.broadcast(value, 0)
    return value


def bitwise(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    """Assert equality of names, dtypes, shapes and bits."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    for name, value in got.items():
        other = want[name]
        assert (value.dtype, value.shape) == (other.dtype, other.shape), name
        assert torch.equal(value, other), name
