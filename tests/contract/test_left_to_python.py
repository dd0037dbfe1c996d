"""Dynamo tries what a loop with a graph break calls; it leaves what zerofx does there to Python."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerofx
from tests.contract.loops import close, compiled, full, net, sgd, train
from tests.ranks import run_ranks


def _whole(model: nn.Module) -> list[Tensor]:
    with zerofx.unshard(model):
        return [param.detach().clone() for param in model.parameters()]


def _averages(copied: nn.Module, model: nn.Module) -> list[Tensor]:
    pairs = list(zip(copied.parameters(), model.parameters(), strict=True))
    for mean, param in pairs:
        mean.lerp_(param, 0.5)
    return [2 * mean - param for mean, param in pairs]


def _ways(model: Any) -> dict[str, Callable[[], Any]]:
    copied = copy.deepcopy(model)
    plain = net()
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    return {
        "full_tensor": lambda: [param.full_tensor() for param in model.parameters()],
        "unshard": lambda: _whole(model),
        "deepcopy": lambda: list(copy.deepcopy(model).parameters()),
        "state_dict": lambda: list(model.state_dict().values()),
        "load_state_dict": lambda: (
            copied.load_state_dict(model.state_dict()) and copied.parameters()
        ),
        "averages": lambda: _averages(plain, model),
    }


def _between_graph_breaks() -> None:
    model = net()
    train(compiled(model, 3), sgd(model), 1)
    for name, way in _ways(model).items():
        found: list[Tensor] = []

        def loop(way: Callable[[], Any] = way, found: list[Tensor] = found) -> None:
            with torch.no_grad():
                for _ in range(2):
                    found[:] = way()
                    torch._dynamo.graph_break()

        torch.compile(loop, backend="eager")()
        for got, param in zip(found, model.parameters(), strict=True):
            close(full(got), full(param), name)


def test_between_graph_breaks() -> None:
    run_ranks(2, _between_graph_breaks)
