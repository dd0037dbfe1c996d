"""Draws and full operands: what is written in place is what a plain tensor would have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.contract.loops import STAGES, close, compiled, config, data, full, net, same, sgd, twin
from tests.ranks import run_ranks

DRAWS: dict[str, Callable[[Any], Any]] = {
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "orthogonal": nn.init.orthogonal_,
    "trunc_normal": lambda w: nn.init.trunc_normal_(w, std=0.02),
    "bernoulli": lambda w: w.bernoulli_(torch.linspace(0, 1, 7)),
    "bernoulli of its own": lambda w: w.bernoulli_(w.sigmoid()),
    "cauchy": lambda w: w.cauchy_(),
    "exponential": lambda w: w.exponential_(2.0),
    "geometric": lambda w: w.geometric_(0.3),
    "log_normal": lambda w: w.log_normal_(),
    "random": lambda w: w.random_(0, 100),
    "own generator": lambda w: w.normal_(generator=torch.Generator().manual_seed(5)),
    "data": lambda w: w.data.uniform_(-1, 1),
    "a row": lambda w: w[11].normal_(),
    "rows of several ranks": lambda w: w[4:9].normal_(std=2.0),
    "a column": lambda w: w.t()[2].uniform_(),
}


def _drawn(stage: int, rows: int) -> None:
    for name, draw in DRAWS.items():
        model, plain = net(lambda: nn.Linear(7, rows)), net(lambda: nn.Linear(7, rows))
        zerofx.shard(model, config(stage))
        torch.manual_seed(3 + dist.get_rank())  # rank 0's numbers win
        with torch.no_grad():
            draw(model.weight)
        after = torch.rand(())
        torch.manual_seed(3)
        with torch.no_grad():
            draw(plain.weight)
        close(full(model.weight), full(plain.weight), name)
        if dist.get_rank() == 0:
            assert torch.equal(after, torch.rand(())), f"{name} took other numbers"


@pytest.mark.parametrize("rows", [12, 13])
def test_draws_are_those_of_one_process(rows: int) -> None:
    for stage in STAGES:
        run_ranks(2, _drawn, stage, rows)


def _reset(model: Any) -> None:
    torch.manual_seed(8)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def _start_over(stage: int) -> None:
    model, ddp = net(), twin(net())
    run, optimizer, other = compiled(model, stage), sgd(model), sgd(ddp)
    for number in range(2):
        for trained, call, stepped in ((model, run, optimizer), (ddp.module, ddp, other)):
            call(*data(number)).backward()
            noise = torch.Generator().manual_seed(number)
            for param in trained.parameters():
                param.grad += 0.1 * torch.randn(param.shape, generator=noise)
            stepped.step()
            stepped.zero_grad()
            if number == 0:
                _reset(trained)
    same(model, ddp)


@pytest.mark.parametrize("stage", [0, 3])
def test_reset_parameters_and_noise(stage: int) -> None:
    run_ranks(2, _start_over, stage)


MATRIX = torch.linspace(-2, 2, 12 * 7).view(12, 7)
OPERANDS: dict[str, Callable[[Any], Any]] = {
    "add": lambda w: w.add_(MATRIX, alpha=2),
    "a row": lambda w: w.mul_(MATRIX[3]),
    "a column": lambda w: w.sub_(MATRIX[:, :1]),
    "lerp": lambda w: w.lerp_(MATRIX, 0.3),
    "addcmul": lambda w: w.addcmul_(MATRIX, MATRIX, value=0.5),
    "masked_fill": lambda w: w.masked_fill_(MATRIX > 0, 9.0),
    "clamp": lambda w: w.clamp_(max=MATRIX),
    "rows": lambda w: w[5:9].add_(MATRIX[:4]),
    "a number": lambda w: w.add_(torch.tensor(0.5)),
    "index_copy": lambda w: w.index_copy_(0, torch.tensor([1, 9]), MATRIX[:2]),
    "index_add": lambda w: w.index_add_(0, torch.tensor([9, 9]), MATRIX[:2]),
    "index_put": lambda w: w.index_put_((torch.tensor([1, 9]),), MATRIX[:2], accumulate=True),
    "scatter_add": lambda w: w.scatter_add_(0, torch.full((2, 7), 9), MATRIX[:2]),
    "cumprod": lambda w: w.cumprod_(0),
    "tril": lambda w: w.tril_(-3),
}


def _operands(stage: int) -> None:
    for name, write in OPERANDS.items():
        model, plain = net(lambda: nn.Linear(7, 12)), net(lambda: nn.Linear(7, 12))
        zerofx.shard(model, config(stage))
        with torch.no_grad():
            write(model.weight), write(plain.weight)
        close(full(model.weight), full(plain.weight), name)


@pytest.mark.parametrize("stage", [1, 3])
def test_full_operands(stage: int) -> None:
    run_ranks(2, _operands, stage)


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "copy": lambda w, value: w.copy_(value),
    "assigned": lambda w, value: setattr(w, "data", value),
    "through data": lambda w, value: w.data.copy_(value),
    "rows": lambda w, value: w.data.__setitem__(slice(None), value),
    "added": lambda w, value: w.add_(value),
    "lerp": lambda w, value: w.data.lerp_(value, 0.5),
    "at least": lambda w, value: w.clamp_(min=value),
    "flat": lambda w, value: w.data.view(-1).copy_(value.view(-1)),
    "vector": lambda w, value: nn.utils.vector_to_parameters(value.view(-1), [w]),
    "gradient": lambda w, value: w.copy_(w.grad.copy_(value)),
}


def _fewer_rows_than_ranks(stage: int) -> None:
    """A head for one number: averages of weights are put in its place, and so on."""
    model, plain = net(lambda: nn.Linear(7, 1)), net(lambda: nn.Linear(7, 1))
    value = torch.linspace(-1, 1, 7).view(1, 7)
    for run, trained in ((compiled(model, stage), model), (plain, plain)):
        run(torch.ones(2, 7)).sum().backward()
        trained.seen = []
        for write in WRITES.values():
            with torch.no_grad():
                write(trained.weight, value.clone())
            trained.seen.append(full(trained.weight))
    for name, ours, theirs in zip(WRITES, model.seen, plain.seen, strict=True):
        close(ours, theirs, name)


@pytest.mark.parametrize("stage", [1, 3])
def test_writes_to_fewer_rows_than_ranks(stage: int) -> None:
    run_ranks(2, _fewer_rows_than_ranks, stage)


def _wide(stage: int) -> None:
    for rows in (5, 1):
        drawn = []
        for sharded in (True, False):
            model = net(lambda: nn.Linear(7, rows))  # noqa: B023
            if sharded:
                zerofx.shard(model, config(stage))
            torch.manual_seed(3)
            nn.init.orthogonal_(model.weight)
            drawn.append(full(model.weight))
        close(drawn[0], drawn[1], f"{rows} rows")


@pytest.mark.parametrize("stage", [1, 3])
def test_orthogonal_rows_of_wide_matrices(stage: int) -> None:
    run_ranks(2, _wide, stage)


def _shared(stage: int) -> None:
    model = net()
    run = compiled(model, stage)
    run(*data(0)).backward()
    model.zero_grad()
    assert model.share_memory() is model
    with torch.no_grad():
        model.last.bias.copy_(2.0)
    assert model.last.bias.to_local().is_shared() and full(model.last.bias).eq(2).all()
    run(*data(1)).backward()
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_shared_memory_and_numbers(stage: int) -> None:
    run_ranks(2, _shared, stage)
