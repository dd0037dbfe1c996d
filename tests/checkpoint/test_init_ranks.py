"""Ranks whose constructors compute other numbers, or do other things, inside `meta_init`."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.checkpoint.runs import bitwise, sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError


class Computed(nn.Module):
    """Numbers of it come from generators that are not torch's."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        own, other = random.Random(seed), np.random.default_rng(seed)
        self.first, self.last = nn.Linear(9, 30), nn.Linear(30, 5)
        nn.init.normal_(self.first.weight, std=own.random())
        nn.init.trunc_normal_(self.last.weight, std=own.random())
        with torch.no_grad():
            self.first.bias.copy_(torch.from_numpy(other.random(30)))
            self.last.weight.mul_(own.randrange(2, 9))
            self.last.bias.fill_(own.randrange(100))
        self.given = nn.Parameter(torch.tensor(other.random((3, 4))))
        self.rolled = nn.Parameter(torch.roll(torch.rand(20), own.randrange(20)))
        self.register_buffer("mask", torch.full((3,), own.random()) * torch.tensor(other.random(3)))


def _full(model: nn.Module) -> dict[str, Tensor]:
    """Of this rank's replica."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def _computed(stage: int, replicate: int) -> None:
    torch.manual_seed(3)
    wanted = Computed(11)
    torch.manual_seed(3 + dist.get_rank())
    with zerofx.meta_init():
        model = Computed(11 + dist.get_rank())
    zerofx.shard(model, sharded_by(stage, replicate=replicate))
    bitwise(_full(model), _full(wanted))


def test_numbers_that_constructors_compute_are_rank_0s() -> None:
    for stage in (1, 3):
        run_ranks(2, _computed, stage, 1)
    run_ranks(4, _computed, 3, 2)


def _other_steps() -> None:
    def more(model: nn.Module) -> None:
        nn.init.zeros_(model.bias)  # pyright: ignore[reportArgumentType]

    def other(model: nn.Module) -> None:
        nn.init.ones_(model.bias) if dist.get_rank() else more(model)  # pyright: ignore

    changes: list[tuple[Callable[[nn.Module], object], str, str]] = [
        (
            lambda model: more(model) if dist.get_rank() else None,
            "rank 0: rand",
            "rank 1: zero_",
        ),
        (other, "rank 0: zero_", "rank 1: fill_"),
        (lambda model: torch.manual_seed(1) if dist.get_rank() else None, "(0, 'a state')", "None"),
    ]
    for change, ours, theirs in changes:
        with zerofx.meta_init():
            model = nn.Linear(9, 30)
            change(model)
            model.more = nn.Parameter(torch.rand(3))
        with refused("rank 0 and rank 1", ours, theirs, kind=UnsupportedError):
            zerofx.shard(model, sharded_by(3))


def test_other_operations_are_refused_on_all_ranks() -> None:
    run_ranks(2, _other_steps)
