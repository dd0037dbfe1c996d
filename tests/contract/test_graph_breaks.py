"""Models that Dynamo cuts into several graphs, whatever it is that each of them reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.loops import FAST, compiled, data, net, same, sgd, sharded, train, twin
from tests.ranks import run_ranks


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 9)
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        torch._dynamo.graph_break()
        return torch.tanh(self.linear(x))


class _TiedOutside(nn.Module):
    """The inner model, in which Dynamo breaks, owns all parameters; the head holds one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _Inner()
        self.head = nn.Linear(7, 9, bias=False)
        self.head.weight = self.inner.embed.weight
        self.out = 5

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inner(x) @ self.head.weight
        return F.mse_loss(x[:, : self.out], y)


class _BufferAlone(nn.Module):
    """A graph that reads a buffer and no parameter; ranks hold different values at first."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        x = x * self.scale
        torch._dynamo.graph_break()
        with torch.no_grad():
            y = y * self.scale
        torch._dynamo.graph_break()
        return F.mse_loss(x, y)


class _Views(nn.Module):
    """Outputs of a graph that share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.linear(x)
        left, right, whole = x[:, :5], x[:, 5:], x.view(-1)
        torch._dynamo.graph_break()
        return F.mse_loss(left * right, y) + whole.mean()


class _ViewsOfAWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.linear.weight
        left, right = weight[:5], weight[5:]
        torch._dynamo.graph_break()
        return F.mse_loss(F.linear(x, left * right, self.linear.bias[:5]), y)


class _WithoutStorage(nn.Module):
    """Values inside `torch.vmap`, as in a scan, and sparse ones have no storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.vmap(lambda row: torch.tanh(row).view(-1) * 2)(self.linear(x))
        mixing = torch.eye(len(x)).to_sparse()
        return F.mse_loss(torch.sparse.mm(mixing, x), y)


BUILDS = (_TiedOutside, _BufferAlone, _Views, _ViewsOfAWeight, _WithoutStorage)


def _as_ddp(build: Any, stage: int, **options: Any) -> None:
    model, ddp = net(build), twin(net(build))
    train(compiled(model, stage, **options), sgd(model))
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("build", BUILDS)
def test_trains_as_ddp_does(build: Any, stage: int) -> None:
    run_ranks(2, _as_ddp, build, stage)


@pytest.mark.parametrize("build", [_Views, _ViewsOfAWeight])
def test_views_where_programs_take_dtensors(build: Any) -> None:
    run_ranks(2, _as_ddp, build, 3, options={**FAST, "grad_dtype": torch.float32})


class _Energy(nn.Module):
    """Differentiates a part of itself: forces of an energy."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))
        self.create_graph = create_graph

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = self.net(x)
            (force,) = torch.autograd.grad(
                out.sum(), x, create_graph=self.create_graph, retain_graph=True
            )
        return F.mse_loss(out, y) * force.square().mean()


def _energy(stage: int) -> None:
    model, ddp = net(lambda: _Energy(False)), twin(net(lambda: _Energy(False)))
    train(compiled(model, stage), sgd(model))
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp)
    model, ddp = net(lambda: _Energy(True)), twin(net(lambda: _Energy(True)))
    run = compiled(model, stage)
    if torch.__version__ < "2.15":
        with pytest.raises(RuntimeError, match="double backward"):  # of plain aot_eager, too
            run(*data(0)).backward()
    else:
        train(run, sgd(model))
        train(ddp, sgd(ddp))
        same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_backward_inside_forward(stage: int) -> None:
    run_ranks(2, _energy, stage)
