"""Generated classes of sharded modules: what compares, copies and slices them, and how they end."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tests.contract.loops import (
    Net,
    close,
    compiled,
    data,
    net,
    refused,
    still_plain,
    trains_alike,
)
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


class Listed(nn.Module):
    """Uses slices of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(7, 7) / 3 for _ in range(3)])
        self.last = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for weight in self.weights[:-1]:
            x = torch.tanh(x @ weight)
        return F.mse_loss(self.last(x @ self.weights[-1]), y) + self.weights[::2][1].square().sum()


class Forwarding(nn.Module):
    """Sets attributes on what it wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.scale = nn.Parameter(torch.ones(3))

    def __setattr__(self, name: str, value: Any) -> None:
        if "inner" in vars(self).get("_modules", ()) and name != "scale":
            setattr(self.inner, name, value)
        else:
            super().__setattr__(name, value)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.inner(x, y) * self.scale.sum()


class Named(Net):
    """Knows fewer arguments than torch by now."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().named_parameters(prefix, recurse)


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x * self.scale, y)


def traced() -> nn.Module:
    """As torchvision's feature extractors are made: its class has a forward of no module."""
    return fx.symbolic_trace(Scaled())


def exported() -> nn.Module:
    return torch.export.export(Net(), data(0)).module()


def _trains(kind: Callable[[], nn.Module], stage: int) -> None:
    model = net(kind)
    trains_alike(run := compiled(model, stage), model, net(kind), 1e-5)
    if isinstance(model, fx.GraphModule):  # which writes to its class
        want = run(*data(0)).detach()
        model.recompile()
        close(run(*data(0)).detach(), want, "after an edit")


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(Listed, 1), (Listed, 3), (Forwarding, 3), (Named, 3), (traced, 3), (exported, 1)],
)
def test_they_behave_as_the_users(kind: Callable[[], nn.Module], stage: int) -> None:
    run_ranks(2, _trains, kind, stage)


class Asking(nn.Module):
    """Does with a layer what its type asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 5)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) if type(layer) is nn.Linear else layer(x)
        return F.mse_loss(x, y)


def _decorated(forward: Any) -> Any:
    return functools.wraps(forward)(lambda *args: forward(*args))


class AskingForSome(Asking):
    @_decorated
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * (2 if layer.__class__ in (nn.LayerNorm, nn.BatchNorm1d) else 1)
        return F.mse_loss(x, y)


class AskingForOthers(Asking):
    """What has no parameters has its own class, which may know of no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.ReLU())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in (*self.layers, nn.ReLU()):
            x = 2 * layer(x) if type(layer) is nn.ReLU else layer(x)
        return F.mse_loss(x[:, :5], y)


def _asking() -> None:
    for kind, line in (
        (Asking, "type(layer) is nn.Linear"),
        (AskingForSome, "layer.__class__ in (nn.LayerNorm, nn.BatchNorm1d)"),
    ):
        model = net(kind)
        with refused(line, "test_classes.py:", "isinstance", kind=UnsupportedError):
            compiled(model, 3)(*data(0))
        still_plain(model)
    _trains(AskingForOthers, 3)


def test_a_forward_that_compares_types() -> None:
    run_ranks(2, _asking)


def _made_again(stage: int) -> None:
    model = net()
    compiled(model, stage)(*data(0)).backward()
    torch.manual_seed(1)
    again = type(model.first)(7, 13)
    again.double()
    del again.bias
    for made in (copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert type(made.weight) is nn.Parameter
        close(made.weight.detach(), again.weight.detach(), "weight")


@pytest.mark.parametrize("stage", [1, 3])
def test_a_plain_layer_of_such_a_class_is_copied(stage: int) -> None:
    run_ranks(2, _made_again, stage)


def _classes_left() -> int:
    made: list[Any] = []
    for _ in range(2):

        class Local(Net):
            pass

        model = net(Local)
        compiled(model, 3)(*data(0)).backward()
        made.append(weakref.ref(Local))
        del model, Local
    torch._dynamo.reset()
    gc.collect()
    return sum(each() is not None for each in made)


def test_classes_go_with_their_models() -> None:
    assert run_ranks(2, _classes_left) == [0, 0]
