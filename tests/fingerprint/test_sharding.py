"""Ranks that shard different models stop before the first collective."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.ranks import run_ranks
from zerofx.errors import DivergedError


def _narrow(odd: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if odd else 6))


def _dtype(odd: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if odd:
        model[1].weight = nn.Parameter(model[1].weight.double())
    return model


def _order(odd: bool) -> nn.Module:
    first, second = ("b", "a") if odd else ("a", "b")
    return nn.ModuleDict({first: nn.Linear(4, 4), second: nn.Linear(4, 4)})


def _frozen(odd: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(not odd)
    return model


def _longer(odd: bool) -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(3 if odd else 2)))


def _buffers(odd: bool) -> nn.Module:
    model = nn.Linear(4, 4)
    model.register_buffer("labels", torch.arange(5 if odd else 8))
    model.register_buffer("scale", torch.ones(3, dtype=torch.float64 if odd else torch.float32))
    if odd:
        model.register_buffer("extra", torch.ones(2))
    return model


def _same(odd: bool) -> nn.Module:
    return nn.Linear(4, 4)


CASES: dict[str, tuple[Callable[[bool], nn.Module], str]] = {
    "shape": (_narrow, "1.weight: torch.float32[5, 4]"),
    "dtype": (_dtype, "1.weight: torch.float64[4, 4]"),
    "order": (_order, "b.weight"),
    "frozen": (_frozen, "0.weight: torch.float32[4, 4], frozen"),
    "missing": (_longer, "2.weight"),
    "buffers' shapes": (_buffers, "buffer labels: torch.int64[5]"),
    "buffers' dtypes": (_buffers, "buffer scale: torch.float64[3]"),
    "buffers missing": (_buffers, "buffer extra: torch.float32[2]"),
    "options": (_same, "small below 7"),
}


def _messages(odd_rank: int) -> dict[str, str]:
    """What this rank is told in each case; the group stays usable, since nothing was sent."""
    odd = dist.get_rank() == odd_rank
    told = {}
    for name, (build, _) in CASES.items():
        config = zerofx.ZeroConfig(min_shard_numel=7 if odd and name == "options" else 0)
        try:
            zerofx.shard(build(odd), config)
            told[name] = "nothing"
        except DivergedError as error:
            told[name] = str(error)
    torch.distributed.barrier()
    return told


@pytest.mark.parametrize("world_size, odd_rank", [(2, 0), (2, 1), (4, 2)])
def test_every_rank_names_what_differs(world_size: int, odd_rank: int) -> None:
    told = run_ranks(world_size, _messages, odd_rank, timeout=60)
    for name, (_, offender) in CASES.items():
        for rank, messages in enumerate(told):
            text = messages[name]
            assert "shard different models" in text, f"{name}, rank {rank}: {text}"
            assert offender in text, f"{name}, rank {rank}: {text}"


def _shard_twice() -> int:
    model = zerofx.shard(nn.Linear(4, 4), zerofx.ZeroConfig(min_shard_numel=0))
    model.extra = nn.Linear(4, 5 + dist.get_rank())
    try:
        zerofx.shard(model, zerofx.ZeroConfig(min_shard_numel=0))
    except DivergedError:
        return 1
    return 0


def test_what_is_added_later_is_compared_too() -> None:
    assert run_ranks(2, _shard_twice, timeout=60) == [1, 1]
