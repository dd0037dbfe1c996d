"""Jagged nested tensors: inputs and outputs of several parts, of which one has a gradient."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.contract.loops import FAST, close, net, same, sgd, twin
from tests.ranks import run_ranks


class _Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 32, bias=False), nn.Linear(8, 32, bias=False)
        self.norm, self.out = nn.LayerNorm(16, bias=False), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (part(x).unflatten(-1, (2, 16)) for part in (self.query, self.key))
        return self.out(self.norm(query).flatten(-2) + key.flatten(-2))


class _Padded(nn.Module):
    """Backward finds the number of all rows by a node, which several segments need."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        padded = torch.nested.to_padded_tensor(torch.tanh(self.inner(x)), 0.0)
        return self.out(padded.sum(1))


def _train(stage: int, build: type[nn.Module]) -> None:
    model, ddp = net(build), twin(net(build))
    run = torch.compile(model, backend=f"zero{stage}", options=FAST)
    optimizers = sgd(model), sgd(ddp)
    for step in range(3):
        draw = torch.Generator().manual_seed(2 * step + dist.get_rank())
        rows = [torch.randn(number, 8, generator=draw) for number in (3, 5 + step)]
        x = torch.nested.nested_tensor(rows, layout=torch.jagged)
        ours, theirs = (_loss(each(x)) for each in (run, ddp))
        close(ours.detach(), theirs.detach(), "loss")
        for loss, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    same(model, ddp)


def _loss(y: Tensor) -> Tensor:
    return (y.values() if y.is_nested else y).square().mean()


@pytest.mark.parametrize("stage", [1, 3])
def test_jagged_tensors(stage: int) -> None:
    run_ranks(2, _train, stage, _Ragged)


def test_jagged_tensors_that_are_padded() -> None:
    run_ranks(2, _train, 3, _Padded)
