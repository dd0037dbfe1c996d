"""`zerofx.unshard` of a model, of a module inside it, and of single parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.contract.loops import Net, close, compiled, config, data, net, refused, same
from tests.ranks import run_ranks
from zerofx.errors import ShardingError


class _Nested(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(13, 13), nn.Linear(13, 5))
        self.tied = nn.Linear(13, 13)
        self.tied.weight = self.last[0].weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) + self.tied(torch.tanh(self.first(x))).mean()


def _parts(stage: int) -> None:
    model, plain = net(_Nested), net(_Nested)
    run = compiled(model, stage)
    run(*data(0))
    with zerofx.unshard(model.last) as values:
        assert list(values) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        values["0.weight"].mul_(2)
        got = torch.func.functional_call(nn.Linear(13, 5), _named(values, "1."), torch.ones(13))
        close(got, plain.last[1](torch.ones(13)), "a part called with its values")
    chosen: list[Any] = [model.first.bias, model.tied.weight]
    with zerofx.unshard(chosen) as values:
        assert list(values) == ["first.bias", "last.0.weight"]
        values["first.bias"].fill_(3)
    with zerofx.unshard(iter(chosen), writeback=False) as values:
        values["first.bias"].zero_()
    with zerofx.unshard(model.first.weight) as values:
        assert list(values) == ["first.weight"]
        values["first.weight"] = values["first.weight"] * 3
    with torch.no_grad():
        plain.last[0].weight.mul_(2)
        plain.first.bias.fill_(3)
        plain.first.weight.mul_(3)
        same(model, plain)
        close(run(*data(1)), plain(*data(1)), "after writing back")
    with zerofx.unshard(run) as values:
        assert list(values) == [name for name, _ in plain.named_parameters()]


def _named(values: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_a_module_and_parameters_inside_a_model(stage: int) -> None:
    run_ranks(2, _parts, stage)


def _strangers() -> None:
    model = net()
    zerofx.shard(model, config(3))
    with (
        refused("no parameter", "shape [3, 2]", "model.parameters()", kind=ShardingError),
        zerofx.unshard([model.first.weight, nn.Parameter(torch.zeros(3, 2))]),
    ):
        pass
    with refused("not sharded", kind=ShardingError), zerofx.unshard(net()):
        pass
    named: Any = model.named_parameters()
    with refused("no parameter", "tuple of", kind=ShardingError), zerofx.unshard(named):
        pass


def test_what_is_not_sharded_is_refused() -> None:
    run_ranks(2, _strangers)


def _unfit(stage: int) -> None:
    model = net()
    run = compiled(model, stage)
    run(*data(0))
    wanted = net()
    last = len(wanted.first.bias) - 1
    with refused("first.bais was added"), zerofx.unshard(model) as values:
        values["first.bais"] = torch.zeros(13)
    with refused("first.bias is gone"), zerofx.unshard(model) as values:
        del values["first.bias"]
    with refused("first.bias of shape [13] is now [5]"), zerofx.unshard(model) as values:
        values["first.bias"] = torch.zeros(5)
    with refused("first.bias of shape [13] is now ['float']"), zerofx.unshard(model) as values:
        values["first.bias"] = 0.0  # pyright: ignore[reportArgumentType]
    for row in (0, last):  # of one rank, and of the other
        with refused("differently", "first.bias", "broadcast"), zerofx.unshard(model) as values:
            if dist.get_rank() == 0:
                values["first.bias"][row] = 7.0
    with refused("differently", "first.bias"), zerofx.unshard(model) as values:
        if dist.get_rank() == 0:
            values["first.bias"].data[0] = 7.0  # which autograd does not count
    with pytest.raises(KeyError), zerofx.unshard(model) as values:
        values["first.bias"].zero_()
        raise KeyError
    same(model, wanted)
    with zerofx.unshard(model) as values:
        if dist.get_rank() == 0:
            values["first.bias"][last] = 7.0
        dist.broadcast(values["first.bias"], 0)
    with torch.no_grad():
        wanted.first.bias[last] = 7.0
    same(model, wanted)


@pytest.mark.parametrize("stage", [1, 3])
def test_values_that_cannot_be_written_back_are_refused(stage: int) -> None:
    run_ranks(2, _unfit, stage)


def _between(stage: int) -> None:
    model = net()
    loss = compiled(model, stage)(*data(0))
    with zerofx.unshard(model) as values:
        values["last.weight"].mul_(2)
    with refused("between a forward and its backward", "last.weight"):
        loss.backward()


@pytest.mark.parametrize("stage", [1, 3])
def test_an_edit_between_a_forward_and_its_backward_is_refused(stage: int) -> None:
    run_ranks(2, _between, stage)
