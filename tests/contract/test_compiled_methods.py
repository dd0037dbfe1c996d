"""Models of which a method is compiled, as torch does with what it has compiled before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.contract.loops import FAST, compiled, data, net, refused, same, sgd, train, twin
from tests.ranks import run_ranks
from zerofx.errors import ShardingError

WAYS: dict[str, Any] = {
    "twice": lambda model: torch.compile(compiled(model, 3), backend="zero3", options=FAST),
    "forward": lambda model: compiled(model, 3).forward,
    "method": lambda model: compiled(model.forward, 3),
}


def _container() -> nn.Module:
    """Dynamo compiles no call of torch's own modules, but what is around it."""
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))


def _trains(way: str) -> None:
    model, ddp = net(_container), twin(net(_container))
    run, optimizer = WAYS[way](model), sgd(model)
    train(lambda x, y: F.mse_loss(run(x), y), optimizer)
    train(lambda x, y: F.mse_loss(ddp(x), y), sgd(ddp))
    same(model, ddp)
    model, ddp = net(), twin(net())
    train(WAYS[way](model), sgd(model))
    train(ddp, sgd(ddp))
    same(model, ddp)


@pytest.mark.parametrize("way", WAYS)
def test_they_train_as_ddp_does(way: str) -> None:
    run_ranks(2, _trains, way)


def _casts() -> None:
    for given in ({"output_dtype": torch.float64}, {"param_dtype": torch.bfloat16}):
        options = {**FAST, **given}
        run = torch.compile(compiled(net(), 3), backend="zero3", options=options)
        late = "output_dtype" if "output_dtype" in given else "cast_forward_inputs"
        with refused("not Net", "method forward", late, "compile the model", kind=ShardingError):
            run(*data(0))


def test_casts_at_the_border_of_the_model_are_not_lost() -> None:
    run_ranks(2, _casts)
