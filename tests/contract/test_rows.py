"""Writes through rows and `data` arrive in gradients too, and wrong ones are refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import zerofx
from tests.contract.loops import (
    close,
    compiled,
    config,
    data,
    full,
    net,
    refused,
    same,
    sgd,
    twin,
)
from tests.ranks import run_ranks


def _gradients(stage: int) -> None:
    """Rows of gradients, as of an embedding that is frozen in part."""
    model, ddp = net(), twin(net())
    for trained, run in ((model, compiled(model, stage)), (ddp.module, ddp)):
        run(*data(0)).backward()
        grad = trained.first.weight.grad
        grad[:3] = 0
        grad[-1].mul_(2)
        trained.last.weight.grad.data = trained.last.weight.grad * 0.5
        trained.last.bias.grad[0] += 1
        trained.first.bias.grad = None
        sgd(trained).step()
    same(model, ddp)


@pytest.mark.parametrize("stage", [0, 3])
def test_rows_of_gradients(stage: int) -> None:
    run_ranks(2, _gradients, stage)


def _asked_for(stage: int) -> None:
    """As `torch.autograd.grad` gives them: in one vector, projected, and in place."""
    vectors = []
    model, ddp = net(), twin(net())
    for trained, run in ((model, compiled(model, stage)), (model, model), (ddp.module, ddp)):
        params = list(trained.parameters())
        grads = torch.autograd.grad(run(*data(0)), params)
        grads[0][1].mul_(2)
        flat = torch.cat([full(grad.view(-1)) for grad in grads])
        if trained is not model:
            dist.all_reduce(flat)
            flat /= dist.get_world_size()
        vectors.append(flat)
    close(vectors[0], vectors[2], "compiled")
    close(vectors[1], vectors[2], "op by op")


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_that_the_loop_asks_for(stage: int) -> None:
    run_ranks(2, _asked_for, stage)


# Each is a line of some initialisation or pruning: a matrix of 12 or 13 times 7.
WRITES: dict[str, Callable[[Any], Any]] = {
    "select": lambda w: w.select(0, 11).fill_(1),
    "narrow": lambda w: w.narrow(0, 5, 4).mul_(2),
    "chunk": lambda w: w.chunk(4)[1].fill_(3),
    "split": lambda w: w.split([6, len(w) - 6])[1].zero_(),
    "diagonal": lambda w: w.diagonal().fill_(1),
    "transposed row": lambda w: w.t()[2].fill_(4),
    "transposed column": lambda w: w.transpose(0, 1)[:, 11].fill_(5),
    "row of a column": lambda w: w[:, 3][11].fill_(8),
    "nested": lambda w: w.narrow(0, 4, 6)[1:3].select(1, 2).add_(1),
    "added": lambda w: operator.iadd(w.chunk(2)[1], 1),
    "data of a row": lambda w: w[11].data.fill_(9),
    "full values": lambda w: w.copy_(torch.arange(7.0) + w.shape[0]),
    "full values of rows": lambda w: w.narrow(0, 7, 2).copy_(torch.arange(14.0).view(2, 7)),
    "set": lambda w: operator.setitem(w.chunk(2)[1], 2, 9),
    "flatten": lambda w: w.flatten()[40:60].fill_(6),
    "view": lambda w: w.view(-1)[-3:].fill_(7),
    "unbind": lambda w: w.unbind()[11].neg_(),
    "rows": lambda w: [row.div_(1 + i) for i, row in enumerate(w)],
}


def _views(stage: int, rows: int) -> None:
    """Also of `data` and of gradients."""
    model, plain = net(lambda: nn.Linear(7, rows)), net(lambda: nn.Linear(7, rows))
    zerofx.shard(model, config(stage))
    for trained in (model, plain):
        weight: Any = trained.weight
        weight.grad = torch.ones_like(weight)
        for write in WRITES.values():
            for value in (weight.data, weight.grad):
                write(value)
            with torch.no_grad():
                write(weight)
    assert torch.equal(full(model.weight), full(plain.weight))
    assert torch.equal(full(model.weight.grad), full(plain.weight.grad))


def _flattened(stage: int) -> None:
    """The gradient of a penalty on all weights as one vector; noise on them."""
    model, ddp = net(), twin(net())
    compiled(model, stage)(*data(0))
    noise = torch.randn(sum(param.numel() for param in model.parameters()))
    for trained in (model, ddp.module):
        vector = parameters_to_vector(trained.parameters())
        vector.square().sum().backward()
        with torch.no_grad():
            noisy = full(parameters_to_vector(trained.parameters())) + noise
        vector_to_parameters(noisy, trained.parameters())
        trained.seen = [full(param.grad) for param in trained.parameters()]
    for mine, other in zip(model.seen, ddp.module.seen, strict=True):
        close(mine, other, "gradient of a penalty")
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_as_one_vector(stage: int) -> None:
    run_ranks(2, _flattened, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_writes_through_views(stage: int) -> None:
    for rows in (12, 13):
        run_ranks(2, _views, stage, rows)


def _refused_data() -> None:
    model = net()
    zerofx.shard(model, config(3))
    for value in (torch.zeros(3), torch.zeros(13, 7, dtype=torch.float64)):
        with refused("(13, 7)", "nn.Parameter"):
            model.first.weight.data = value
    assert full(model.first.weight).any()


def test_data_of_another_kind_is_refused() -> None:
    run_ranks(2, _refused_data)


def _detached() -> None:
    """Rows of whatever shares the parameter's memory; a parameter made of them is of its class."""
    model = net()
    zerofx.shard(model, config(3))
    weight: Any = model.first.weight
    weight.detach()[0].fill_(2.0)
    weight.detach()[1].detach()[0].fill_(3.0)
    weight.data[0, 2].fill_(3.0)
    double = torch.compile(lambda *values: [value * 2 for value in values], backend="aot_eager")
    parts = (weight.data[1], weight[1], weight.data.select(0, 1), weight.data.t())
    for twice in double(weight, weight.data, weight.detach(), *parts):
        assert full(twice).max() == 6, type(twice)
    made = nn.Parameter(weight.data)
    assert isinstance(made, nn.Parameter) and type(made * 1) is not type(weight)
    values = full(weight)
    assert values[0].tolist() == [2, 2, 3, 2, 2, 2, 2] and values[1, 0] == 3


def test_rows_of_detached_parameters() -> None:
    run_ranks(2, _detached)
