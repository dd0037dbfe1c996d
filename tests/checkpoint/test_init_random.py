"""Seeds and generators in constructors that run inside `meta_init`: numbers of one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Generator, Tensor, nn

import zerofx
from tests.checkpoint.runs import bitwise, full, sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


class Seeds(nn.Module):
    """Sets seeds and states of torch's own generator between draws."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.first = nn.Linear(9, 30)
        self.again = nn.ModuleList()
        for _ in range(3):
            torch.manual_seed(seed)
            self.again.append(nn.Linear(9, 30))
            self.again.append(nn.Linear(30, 3))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.apart = nn.Linear(9, 30)
        self.later = nn.Linear(9, 30)
        kept = torch.get_rng_state()
        self.one = nn.Linear(9, 30)
        nn.init.trunc_normal_(self.one.weight)
        torch.set_rng_state(kept)
        self.two = nn.Linear(9, 30)
        torch.set_rng_state(kept)
        self.three = nn.Linear(9, 30)


class Draws(nn.Module):
    """Draws from generators of its own and of others."""

    def __init__(self, seed: int, given: Generator) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.rand(5, 7, generator=own))
        self.b = nn.Parameter(torch.empty(40).normal_(generator=own))
        self.c = nn.Parameter(torch.randn(3, generator=given))
        torch.manual_seed(seed)
        self.d = nn.Linear(9, 30)
        for weight in (self.a, self.d.weight):
            nn.init.trunc_normal_(weight, generator=own)
            nn.init.sparse_(weight, 0.3, generator=own)
        fork = torch.Generator()
        fork.set_state(own.get_state())
        self.e = nn.Parameter(torch.rand(2, 3, generator=fork))
        own.manual_seed(seed)
        self.f = nn.Parameter(torch.rand(5, 7, generator=own))
        self.g = nn.Parameter(torch.rand(5, generator=torch.default_generator))
        fork.manual_seed(seed + 1)
        self.register_buffer("real", torch.arange(9.0).uniform_(generator=fork))
        self.h = nn.Parameter(torch.rand(3, generator=fork))
        self.i = nn.Parameter(torch.rand(3, generator=given))


def _values(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def _seeded() -> None:
    rank = dist.get_rank()
    torch.manual_seed(3)
    wanted = Seeds(7)
    torch.manual_seed(3 + rank)
    before = torch.get_rng_state()
    with zerofx.meta_init():
        model = Seeds(7 + rank)
    assert torch.equal(torch.get_rng_state(), before)
    zerofx.shard(model, sharded_by(3))
    assert torch.equal(torch.get_rng_state(), before)
    bitwise(_values(model), _values(wanted))
    assert torch.equal(wanted.two.weight, wanted.three.weight)


def test_seeds_and_states_between_draws() -> None:
    run_ranks(2, _seeded)


def _given() -> None:
    rank = dist.get_rank()
    wanted = Draws(7, torch.Generator().manual_seed(5))
    given = torch.Generator().manual_seed(5 + rank)
    before = given.get_state()
    with zerofx.meta_init():
        model = Draws(7 + rank, given)
    assert torch.equal(given.get_state(), before)
    zerofx.shard(model, sharded_by(3))
    assert torch.equal(given.get_state(), before)
    bitwise(_values(model), _values(wanted))


def test_generators_of_a_constructor() -> None:
    run_ranks(2, _given)


def _at_once() -> None:
    own, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for generator in (None, torch.default_generator, own):
        with zerofx.meta_init(), refused("random numbers", "nothing", kind=UnsupportedError):
            torch.empty(3).normal_(generator=own)
            torch.arange(3.0).normal_(generator=generator)
    with zerofx.meta_init():
        values = torch.arange(3.0).normal_(generator=other)
    assert torch.equal(values, torch.empty(3).normal_(generator=own))
    assert torch.equal(other.get_state(), own.get_state())


def test_numbers_that_are_drawn_at_once() -> None:
    run_ranks(1, _at_once)
