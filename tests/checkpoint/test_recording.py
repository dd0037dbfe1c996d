"""What a block of `meta_init` writes down, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import zerofx
from tests.checkpoint.runs import bitwise, full, sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def _asked() -> None:
    def asks() -> nn.Module:
        return nn.Linear(3, 3 if torch.rand(1).item() > 2 else 4)

    with zerofx.meta_init(), refused("does not exist yet", "linspace", kind=UnsupportedError):
        asks()
    real, index = torch.arange(3.0), torch.arange(3)
    writes: list[Callable[[Tensor], object]] = [
        lambda unknown: real.copy_(unknown),
        lambda unknown: torch.add(unknown, 1, out=real),
        lambda unknown: torch.sort(unknown, out=(torch.empty(3), index)),
        lambda unknown: torch.addmv(unknown, unknown.expand(3, 3), unknown, out=real),
    ]
    for write in writes:
        kept = real.clone()
        with zerofx.meta_init(), refused("does not exist", kind=UnsupportedError):
            write(torch.ones(3))
        assert torch.equal(real, kept)
    with zerofx.meta_init(), refused("random numbers", kind=UnsupportedError):
        torch.arange(3.0).normal_()
    with zerofx.meta_init():
        lost = nn.Module()
        lost.a = nn.Parameter(torch.empty(3))
        lost.b = copy.deepcopy(lost.a)
    with refused("a (parameter)", "b (parameter)", "in the constructor", kind=UnsupportedError):
        zerofx.shard(lost, sharded_by(3))
    with zerofx.meta_init():
        one = nn.Linear(3, 3)
    with zerofx.meta_init():
        other = nn.Linear(3, 3)
    with refused("different", "one block", kind=UnsupportedError):
        zerofx.shard(nn.Sequential(one, other), sharded_by(3))
    with zerofx.meta_init():
        early = nn.Linear(3, 3)
        with refused("inside a block", "after the block", kind=UnsupportedError):
            zerofx.shard(early, sharded_by(3))
    zerofx.shard(early, sharded_by(3))


def test_what_cannot_be_recorded_is_refused() -> None:
    run_ranks(1, _asked)


class Nested(nn.Module):
    """A part of it is built by a function that knows `meta_init`, and changed afterwards."""

    def __init__(self, inner: bool) -> None:
        super().__init__()
        self.first = nn.Linear(9, 30)
        with zerofx.meta_init() if inner else contextlib.nullcontext():
            self.part = nn.Linear(30, 4)
            nn.init.trunc_normal_(self.part.weight)
        nn.init.constant_(self.part.bias, 3.0)
        self.last = nn.Linear(4, 2)
        with torch.no_grad():
            self.part.weight.mul_(2)
        self.part.double()


def _nested() -> None:
    torch.manual_seed(3)
    wanted = Nested(inner=False)
    torch.manual_seed(3)
    with zerofx.meta_init("cpu"):
        model = Nested(inner=True)
    zerofx.shard(model, sharded_by(3))
    bitwise(_values(model), _values(wanted))
    with zerofx.meta_init("cpu"):
        with zerofx.meta_init("cpu:0"):
            nn.Linear(3, 3)
        other = refused("'meta'", "cpu", "the same device", kind=UnsupportedError)
        with other, zerofx.meta_init("meta"):
            pass
        model = nn.Linear(3, 3)
    zerofx.shard(model, sharded_by(3))


def test_a_block_inside_of_another_one_goes_on_with_it() -> None:
    run_ranks(2, _nested)


class Halves(nn.Module):
    """Parameters in one stretch of memory, two that are one, and one made by a transform."""

    def __init__(self) -> None:
        super().__init__()
        one, other = torch.rand(6, 4).chunk(2)
        self.one, self.other = nn.Parameter(one), nn.Parameter(other)
        self.first, self.last = nn.Linear(9, 9), nn.Linear(9, 9)
        self.first.weight = self.last.weight
        self.mapped = nn.Parameter(torch.vmap(lambda row: row + row.sum())(torch.rand(3, 4)))


def _shared() -> None:
    torch.manual_seed(3)
    wanted = Halves()
    torch.manual_seed(3)
    with zerofx.meta_init():
        model = Halves()
    zerofx.shard(model, sharded_by(3))
    assert model.first.weight is model.last.weight
    bitwise(_values(model), _values(wanted))
    for block in (zerofx.meta_init(), torch.device("meta"), torch.device("cpu")):
        with block:
            tied = nn.ModuleList([nn.Linear(9, 9), nn.Linear(9, 9)])
            tied[0].weight.data = tied[1].weight.data
        with refused("0.weight and 1.weight", "the same object", kind=UnsupportedError):
            zerofx.shard(tied, sharded_by(3))


def test_parameters_that_share_memory() -> None:
    run_ranks(2, _shared)


class Empty(nn.Module):
    """Nothing says which values tensors without elements have."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.empty(0, 7))
        self.register_buffer("nothing", torch.empty(0))
        self.last = nn.Linear(9, 9)


class Joined(Empty):
    """Its parameter is made of one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.joined = nn.Parameter(torch.cat([torch.empty(0, 3), torch.ones(4, 3)]))


def _without_elements() -> None:
    builds = ((Joined, zerofx.meta_init()), (Empty, torch.device("meta")))
    for build, block in builds:
        torch.manual_seed(3)
        wanted = build()
        torch.manual_seed(3)
        with block:
            model = build()
        zerofx.shard(model, sharded_by(3))
        bitwise(_values(model), _values(wanted))


def test_tensors_without_elements_need_no_values() -> None:
    run_ranks(2, _without_elements)
