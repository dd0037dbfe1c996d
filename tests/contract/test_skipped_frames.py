"""Frames that Dynamo gives up, so that Python runs them: models train all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.contract.loops import (
    FAST,
    close,
    config,
    data,
    full,
    net,
    refused,
    same,
    sgd,
    sharded,
    train,
    trains_alike,
    twin,
)
from tests.ranks import run_ranks
from zerofx.errors import UnreducedGradientError
from zerofx.sharding.shard import session_of


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        torch._dynamo.graph_break()
        return x


class _Blocks(nn.Module):
    """Dynamo cannot go on after a break inside a loop; `embed` runs before it sees a block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 9)
        self.blocks = nn.ModuleList(_Block() for _ in range(2))
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)


class _Layers(_Blocks):
    """Only modules of torch's own, of which Dynamo compiles no frame."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(9, 9) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            if x.abs().max() > 2:
                x = x / 2
        return F.mse_loss(self.head(x), y)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(7, 5, batch_first=True)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.norm(self.lstm(x[:, None])[0][:, 0]), y)


class _Disabled(_Layers):
    @torch.compiler.disable
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y)


class _Wrapped(nn.Module):
    """Owns what the compiled model does."""

    def __init__(self, run: Any):
        super().__init__()
        self.run = run

    def forward(self, *batch: Tensor) -> Tensor:
        return self.run(*batch)


def _as_ddp(build: Any, stage: int, how: str) -> None:
    torch.compiler.reset()
    model = net(build, seed=dist.get_rank())  # rank 0 wins
    ddp = twin(net(build))
    optimizer = sgd(model)
    run: Any = model
    if how == "in place":
        model.compile(backend=f"zero{stage}", options=FAST)
    else:
        run = torch.compile(model, backend=f"zero{stage}", options=FAST)
    if how == "wrapped":
        run = _Wrapped(run)
    train(run, optimizer)
    train(ddp, sgd(ddp))
    assert sharded(model)
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("build", [_Blocks, _Layers, _Recurrent, _Disabled])
def test_they_train_as_ddp_does(build: Any, stage: int) -> None:
    run_ranks(2, _as_ddp, build, stage, "returned")
    run_ranks(2, _as_ddp, build, stage, "wrapped")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("build", [_Blocks, _Layers, _Recurrent])
def test_compiled_in_place(build: Any, stage: int) -> None:
    run_ranks(2, _as_ddp, build, stage, "in place")


def _assign(model: Any, what: str) -> None:
    torch.manual_seed(7)
    if what == "module":
        model.norm = nn.BatchNorm1d(5)
    elif what == "appended":
        model.lstm, model.norm = nn.LSTM(7, 3, batch_first=True), nn.Linear(3, 5)
    else:
        model.norm.weight = nn.Parameter(torch.full((5,), 2.0))


def _assigned_later(stage: int, what: str) -> None:
    """In parts that no program reads, plain parameters are sharded before the next forward."""
    model = net(_Recurrent)
    run = torch.compile(model, backend=f"zero{stage}", options=FAST)
    plain = net(_Recurrent)
    run(*data(0))
    plain(*data(0))
    for each in (model, plain):
        _assign(each, what)
    ddp = twin(plain)
    run(*data(1)).backward()
    assert sharded(model)
    ddp(*data(1)).backward()
    for param, want in zip(model.parameters(), ddp.module.parameters(), strict=True):
        close(full(param.grad), want.grad, "gradient")


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("what", ["parameter", "module", "appended"])
def test_parameters_assigned_to_them_later(what: str, stage: int) -> None:
    run_ranks(2, _assigned_later, stage, what)


def _grown_uncompiled() -> None:
    model, plain = net(), net()
    zerofx.shard(model, config(3))
    model(*data(0))
    for each, seed in ((model, 7 + dist.get_rank()), (plain, 7)):
        torch.manual_seed(seed)
        each.last = nn.Linear(13, 5)
    model(*data(0)).backward()
    with refused("last.weight", "added to Net", "again", kind=UnreducedGradientError):
        sgd(model).step()
    zerofx.shard(model, config(3)).zero_grad()
    trains_alike(model, model, plain)


def test_parameters_added_to_a_model_that_python_runs() -> None:
    run_ranks(2, _grown_uncompiled)


def _heads_take_turns(stage: int) -> None:
    """What is taken out is forgotten; when it is put back, the model has it again."""
    model = net()
    run = torch.compile(model, backend=f"zero{stage}", options=FAST)
    run(*data(0))
    first, second, seen = model.last, nn.Linear(13, 5), list[Any]()
    for head in (second, first, nn.Identity(), second):
        model.last = head
        y = data(0)[1] if isinstance(head, nn.Linear) else torch.zeros(4, 13)
        run(data(0)[0], y).backward()
        with zerofx.unshard(model) as values:
            assert list(values) == [name for name, _ in model.named_parameters()]
            seen.append(len(values))
        session = session_of(model)
        assert session is not None
        assert len({state.spec.index for state in session.states}) == len(session.states)
        assert len(session.states) == len(values)
    assert seen == [4, 4, 2, 4]


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_that_take_turns(stage: int) -> None:
    run_ranks(2, _heads_take_turns, stage)


class _Whitened(nn.Module):
    """Writes to its buffer before it reads its weight, and the buffer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(9))
        self.weight = nn.Parameter(torch.ones(9))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        weight = self.weight
        return (x - self.mean) * weight


class _Whitening(_Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Whitened()])


def _own_writes(stage: int) -> None:
    """Rank 0's buffers win before a forward, not over what a part of it wrote."""
    model = net(_Whitening)
    ddp = twin(net(_Whitening))
    run = torch.compile(model, backend=f"zero{stage}", options=FAST)
    train(run, sgd(model), 3)
    train(ddp, sgd(ddp), 3)
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_buffers_that_they_write_to(stage: int) -> None:
    run_ranks(2, _own_writes, stage)


def _left_alone() -> None:
    """By the backends of torch, and `torch.compiler.disable`, beside a model of zerofx."""
    for wrap in (torch.compile, torch.compiler.disable):
        model = net(_Layers)
        wrap(model)(*data(0)).backward()
        assert not sharded(model)
    model = net(_Layers)
    torch.compile(model, backend="zero3", options=FAST)(*data(0)).backward()
    assert sharded(model)


def test_other_backends_are_left_alone() -> None:
    run_ranks(2, _left_alone)
