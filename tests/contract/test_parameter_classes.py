"""Parameters of a user's subclass of `nn.Parameter` stay of that class."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import zerofx
from tests.contract.loops import (
    Net,
    close,
    compiled,
    config,
    data,
    full,
    net,
    refused,
    same,
    train,
)
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


class Unit(nn.Parameter):
    """Has rows of length 1, which an optimizer asks for by class; and makes others in `to`."""

    rows: int

    def retract(self) -> None:
        self.data.div_(self.data.norm(dim=1, keepdim=True))

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return type(self)(super().to(*args, **kwargs), rows=self.rows)  # pyright: ignore[reportCallIssue]


class Rows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight = Unit(self.first.weight.detach())
        self.first.weight.rows = 13


class Riemann(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if isinstance(param, Unit):
                    param.retract()


def _by_class(model: nn.Module) -> Riemann:
    """Groups made after sharding: only what is no `Unit` decays."""
    params = list(model.parameters())
    units = [param for param in params if isinstance(param, Unit)]
    others = [param for param in params if not isinstance(param, Unit)]
    assert len(units) == 1 and units[0].rows == 13
    groups = [{"params": units}, {"params": others, "weight_decay": 0.1}]
    return Riemann(groups, lr=0.1, foreach=True)


def _kept(stage: int) -> None:
    # torch's deep copies of parameters lack attributes, so that this is no `twin`.
    model, ddp = net(Rows), DistributedDataParallel(net(Rows))
    run = compiled(model, stage)
    run(*data(0))
    train(run, _by_class(model))
    train(ddp, _by_class(ddp))
    same(model, ddp, 1e-5)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.double().float()):
        train(compiled(clone, stage), _by_class(clone), 1)
        assert isinstance(clone.first.weight, DTensor)
        close(full(clone.first.weight).norm(dim=1), torch.ones(13), "norms")
    assert isinstance(copy.deepcopy(model.first.weight), Unit)


def test_parameters_keep_their_class() -> None:
    run_ranks(2, _kept, 3)


class Slotted(nn.Parameter):
    __slots__ = ("tag",)


def _closed() -> None:
    model = net()
    model.first.bias = Slotted(torch.ones(13))
    with refused("first.bias", "class", kind=UnsupportedError):
        zerofx.shard(model, config(3))


def test_classes_that_leave_no_room_are_refused() -> None:
    run_ranks(1, _closed)
