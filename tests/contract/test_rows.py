"""Writes through rows and `data` arrive in gradients too, and wrong ones are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.contract.loops import STAGES, compiled, config, data, full, net, refused, same, sgd, twin
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


@pytest.mark.parametrize("stage", STAGES)
def test_rows_of_gradients(stage: int) -> None:
    run_ranks(2, _gradients, stage)


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
    for twice in double(weight, weight.data, weight.detach(), weight.data[1], weight[1]):
        assert full(twice).max() == 6, type(twice)
    made = nn.Parameter(weight.data)
    assert isinstance(made, nn.Parameter) and type(made * 1) is not type(weight)
    values = full(weight)
    assert values[0].tolist() == [2, 2, 3, 2, 2, 2, 2] and values[1, 0] == 3


def test_rows_of_detached_parameters() -> None:
    run_ranks(2, _detached)
