"""A model in which a rank ends at a given point of a step, and a loop that trains it."""

from __future__ import annotations

import os
import signal
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

OPTIONS = {"inner": "eager", "min_shard_numel": 0, "hang_timeout": 0.5}
Stage = Literal["forward", "backward", "optimizer", "between"]
WIDTH = 8

_doomed: dict[str, int] = {}
"""Where this rank ends: the point, and how many times it is passed before."""


def doom(point: str, passes: int) -> None:
    """This rank ends when it comes to `point` after so many times."""
    _doomed[point] = passes


def end_at(point: str) -> None:
    """End this process without a word, if its time has come."""
    if _doomed.get(point) == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    _doomed[point] = _doomed.get(point, -1) - 1


@torch.library.custom_op("zerofx_tests::passing", mutates_args=())
def _passing(x: Tensor) -> Tensor:
    end_at("forward")
    return x.clone()


@torch.library.custom_op("zerofx_tests::passing_back", mutates_args=())
def _passing_back(grad: Tensor) -> Tensor:
    end_at("backward")
    return grad.clone()


_passing.register_fake(torch.empty_like)
_passing_back.register_fake(torch.empty_like)
_passing.register_autograd(lambda ctx, grad: _passing_back(grad))


class Layers(nn.Module):
    """Layers with the point at which a rank may end between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if place == 1:
                x = _passing(x)
        return x.square().mean()


class DyingSGD(torch.optim.SGD):
    """Steps; the doomed rank does not come back."""

    def step(self, closure: Any = None) -> Any:
        end_at("optimizer")
        return super().step(closure)


def train(stage: int, doomed: int, point: Stage, **options: Any) -> None:
    """Train on until a rank is gone; the third step of rank `doomed` ends at `point`."""
    if dist.get_rank() == doomed:
        doom(point, 2)
    model = Layers()
    step = torch.compile(model, backend=f"zero{stage}", options={**OPTIONS, **options})
    optimizer = DyingSGD(model.parameters(), lr=0.1)
    for _ in range(6):
        step(torch.randn(4, WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
        end_at("between")
