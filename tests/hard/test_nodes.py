"""Several ranks on each of several nodes: two hops where they pay, and training stays the same."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import patch

import pytest
import torch.distributed as dist

from tests.hard.pair import EAGER, Pair
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.runtime import calibrate
from zerofx.sharding.shard import session_of

HOPS = Algorithms("two_hop", "two_hop")


def _train(stage: int, options: dict[str, Any], name: str = "mlp") -> Algorithms:
    pair = Pair(make(name), stage, {**EAGER, **options}, rtol=1e-6)
    pair.train(lambda run, number: run(*batch(name, dist.get_rank(), number)), 3)
    session = session_of(pair.model)
    assert session is not None and session.sharded.shard_comm is not None
    return session.sharded.shard_comm.algorithms


def _over_a_link(stage: int, hop_ms: dict[Algorithm, float], name: str = "mlp") -> Algorithms:
    """Where gathers by each algorithm take `hop_ms`."""

    def point(*args: Any) -> tuple[float, float]:
        return 0.0, hop_ms[cast(Algorithm, args[1])]

    with patch.object(calibrate, "_point", point):
        return _train(stage, {"ranks_per_node": 2}, name)


@pytest.mark.parametrize(("stage", "name"), [(2, "mlp"), (3, "gpt")])
def test_two_nodes_of_two_ranks(stage: int, name: str) -> None:
    slow: dict[Algorithm, float] = {"point_to_point": 13, "two_hop": 9}
    ways = run_ranks(4, _over_a_link, stage, slow, name, timeout=120)
    assert ways == [HOPS] * 4


def _tried() -> Algorithms:
    """Rank 0 finds that two hops pay as little as they do on a fast link; others are told."""
    rank = dist.get_rank()
    fast: dict[Algorithm, float] = {"point_to_point": 5, "two_hop": 4.5 if rank == 0 else 1}
    return _over_a_link(3, fast)


def test_gathers_take_one_hop_where_the_link_is_fast() -> None:
    wanted = Algorithms("point_to_point", "two_hop")
    assert run_ranks(4, _tried, timeout=120) == [wanted] * 4


def test_both_ways_are_tried() -> None:
    for ways in run_ranks(4, _train, 3, {"ranks_per_node": 2}, timeout=120):
        assert ways.reduce_scatter == "two_hop"


def _detected(local: str) -> Algorithms:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local if dist.get_rank() == 0 else "3")
        return _train(3, {})


def test_what_torchrun_says_on_rank_0_counts_for_all() -> None:
    for local, way in (("2", "two_hop"), ("4", "point_to_point")):
        for found in run_ranks(4, _detected, local, timeout=120):
            assert found.reduce_scatter == way


def _hybrid(replicate: int) -> Algorithms:
    return _train(3, {"replicate": replicate, "ranks_per_node": 2})


def test_groups_that_stay_inside_a_node_take_one_hop() -> None:
    direct = Algorithms("point_to_point", "point_to_point")
    assert run_ranks(4, _hybrid, 2, timeout=120) == [direct] * 4
