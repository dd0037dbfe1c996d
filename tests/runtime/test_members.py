"""Groups that some ranks make by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zerofx.runtime.members import gloo_group, new_group


def _made() -> list[float]:
    """Ranks 0 and 1 are in one group more than rank 2 when they make others with it."""
    dist.new_group([0, 1])
    if dist.get_rank() == 3:
        return [6.0, 6.0]
    found = []
    for make in (new_group, gloo_group):
        number = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(number, group=make([0, 1, 2]))
        found.append(number.item())
    return found


def test_ranks_may_be_in_unequally_many_groups() -> None:
    assert run_ranks(4, _made) == [[6.0, 6.0]] * 4


def _made_after() -> float:
    """A group of all ranks, made by all, after some of them made one."""
    if dist.get_rank() != 3:
        new_group([0, 1, 2])
    number = torch.ones(())
    dist.all_reduce(number, group=dist.new_group([0, 1, 2, 3]))
    return number.item()


def test_groups_of_the_program_are_named_as_without_those() -> None:
    assert run_ranks(4, _made_after) == [4.0] * 4


def test_no_communicator_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would wait for those that are not in the new group."""
    device, asked = torch.device("cuda", 0), []
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", asked.append)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        world.bound_device_id = device
        new_group([0])
        assert not asked and world.bound_device_id == device
    finally:
        dist.destroy_process_group()
