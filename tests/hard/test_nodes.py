"""Several ranks on each of several nodes: messages take two hops, and training stays the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.hard.pair import EAGER, Pair
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx.sharding.shard import session_of


def _train(stage: int, options: dict[str, Any]) -> str:
    pair = Pair(make("gpt"), stage, {**EAGER, **options}, rtol=1e-6)
    pair.train(lambda run, number: run(*batch("gpt", dist.get_rank(), number)), 3)
    session = session_of(pair.model)
    assert session is not None and session.sharded.shard_comm is not None
    return session.sharded.shard_comm.algorithms.all_gather


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_nodes_of_two_ranks(stage: int) -> None:
    ways = run_ranks(4, _train, stage, {"ranks_per_node": 2}, timeout=120)
    assert ways == ["two_hop"] * 4


def _detected(local: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local if dist.get_rank() == 0 else "3")
        return _train(3, {})


def test_what_torchrun_says_on_rank_0_counts_for_all() -> None:
    assert run_ranks(4, _detected, "2", timeout=120) == ["two_hop"] * 4
    assert run_ranks(4, _detected, "4", timeout=120) == ["point_to_point"] * 4


def _hybrid(replicate: int) -> str:
    return _train(3, {"replicate": replicate, "ranks_per_node": 2})


def test_groups_that_stay_inside_a_node_take_one_hop() -> None:
    assert run_ranks(4, _hybrid, 2, timeout=120) == ["point_to_point"] * 4
