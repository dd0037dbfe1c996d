"""Tables of what collectives cost: fitted, kept, agreed by ranks, and obeyed."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.hard.pair import EAGER, Pair
from tests.models import batch, make
from tests.page.dumps import rehearse
from tests.ranks import RanksFailed, run_ranks
from zerofx.config import ZeroConfig
from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.cost.link import Link
from zerofx.cost.machine import loads_machine, machine_of
from zerofx.cost.tables import (
    MOST_BUCKET_BYTES,
    Collective,
    CommCost,
    CommTable,
    fit,
    loads,
    topology,
)
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.ir.ops import REDUCE_START
from zerofx.runtime import collectives, network
from zerofx.runtime.assumed import assumed_table
from zerofx.runtime.calibrate import calibrate
from zerofx.runtime.comm import Comm, make_comm
from zerofx.runtime.network import save_table, table_path
from zerofx.sharding.shard import session_of

POSITIVE = st.floats(1e-7, 1e-2)


@given(alpha=POSITIVE, beta=st.floats(1e-12, 1e-8))
def test_a_line_is_found_again(alpha: float, beta: float) -> None:
    points = [(size, alpha + beta * size) for size in (1e4, 1e6, 1e8)]
    assert fit(points) == pytest.approx((alpha, beta), rel=1e-4)


@given(st.lists(st.tuples(st.floats(1e3, 1e9), POSITIVE), min_size=1, max_size=6))
def test_costs_are_never_negative(points: list[tuple[float, float]]) -> None:
    alpha, beta = fit(points)
    assert alpha >= 0
    assert beta >= 0
    assert alpha + beta > 0


def _table(gather: tuple[float, float], exchange: tuple[float, float]) -> CommTable:
    """Gathers of a native and a point-to-point algorithm; reductions the other way round."""
    names: tuple[Collective, ...] = ("all_gather", "reduce_scatter")
    costs = [CommCost(names[0], "native", "float32", *gather)]
    costs += [CommCost(names[0], "point_to_point", "float32", *exchange)]
    costs += [CommCost(names[1], "native", "float32", *exchange)]
    costs += [CommCost(names[1], "point_to_point", "float32", *gather)]
    return CommTable(topology("gloo", "cpu", 2, 2, torch.__version__), tuple(costs))


SLOW, FAST = (1e-3, 1e-8), (1e-4, 1e-9)


def test_the_cheapest_algorithm_of_each_is_chosen() -> None:
    assert _table(SLOW, FAST).algorithms() == Algorithms("point_to_point", "native")
    assert _table(FAST, SLOW).algorithms() == Algorithms("native", "point_to_point")


def test_buckets_grow_with_latency_and_shrink_with_slow_links() -> None:
    sizes = [
        _table(gather, (1.0, 1.0)).bucket_bytes()
        for gather in ((1e-6, 1e-9), (1e-4, 1e-9), (2e-4, 1e-9), (1.0, 1e-9), (1e-4, 0.0))
    ]
    assert sizes == [1 << 20, 2_000_000, 4_000_000, MOST_BUCKET_BYTES, MOST_BUCKET_BYTES]


def _with_others(table: CommTable) -> CommTable:
    """All-reduces and exchanges of codes, whose seconds before the first byte tell them apart."""
    ways: tuple[Algorithm, ...] = ("native", "point_to_point")
    others = [CommCost("all_reduce", "native", "float32", *FAST)]
    others += [CommCost("all_to_all", way, "uint8", *SLOW) for way in ways]
    return dataclasses.replace(table, costs=(*table.costs, *others))


def test_codes_go_in_messages_where_numbers_do() -> None:
    table = _table(SLOW, FAST)
    assert table.chosen()["all_to_all"] == "native", "native reductions bear no tags"
    messages = [cost for cost in table.costs if cost.algorithm == "point_to_point"]
    chosen = dataclasses.replace(table, costs=tuple(messages)).chosen()
    assert chosen.pop("all_reduce") == "native"
    assert set(chosen.values()) == {"point_to_point"}


def test_each_reduction_finds_its_own_link(gpt: Rehearsal) -> None:
    machine = machine_of("cpu", _with_others(_table(FAST, SLOW)))
    fast, slow = Link(1 / FAST[1], FAST[0]), Link(1 / SLOW[1], SLOW[0])
    assert (machine.reductions, machine.all_reduces, machine.all_to_alls) == (fast, fast, slow)
    gathers, reductions = Link(2.0, 2.0), Link(1.0, 1.0)
    machine = dataclasses.replace(machine, link=gathers, reductions=reductions)

    def found(device: str = "cpu", **options: Any) -> set[Link]:
        config = ZeroConfig(inner="eager", verify=False, **options)
        _, backward = gpt.programs(config, 4)
        there = dataclasses.replace(machine, device=device)
        return {there.link_of(backward, start) for start in backward.calls(REDUCE_START)}

    assert found(stage=0) == {fast, gathers}, "little ones go in messages"
    assert found(stage=3) == {reductions, gathers}, "norms and biases are replicated"
    assert found(stage=3, device="cuda") == {reductions, fast}
    assert found(stage=3, quantize_gradients="int8") == {reductions, gathers, slow}


def test_machines_are_read_again_and_said_links_count_for_all() -> None:
    machine = machine_of("cpu", _with_others(_table(FAST, SLOW)))
    assert loads_machine(machine.dumps()) == machine
    said = machine.with_link(Link(1.0, 2.0))
    assert said.link == Link(1.0, 2.0) and not said.measured
    assert said.reductions is said.all_reduces is said.all_to_alls is None


@pytest.mark.parametrize(
    ("backend", "size", "node_size", "known"),
    [
        ("nccl", 8, 8, True),
        ("nccl", 16, 8, True),
        ("nccl", 4, 4, True),
        ("nccl", 16, 16, False),  # the model takes a node to have eight GPUs here
        ("nccl", 2, 1, False),
        ("nccl", 1, 1, False),
        ("gloo", 8, 8, False),
    ],
)
def test_costs_of_nccl_are_computed(backend: str, size: int, node_size: int, known: bool) -> None:
    group: Any = None
    native = Algorithms("native", "native")
    comm = Comm(group, backend, 0, tuple(range(size)), native, node_size)
    table = assumed_table(comm, torch.device("cuda"))
    assert (table is not None) is known
    if table is None:
        return
    assert loads(table.dumps()) == table and not table.measured
    assert not machine_of("cuda", table).measured
    links = table.links()
    assert set(links) == {"all_gather", "reduce_scatter", "all_reduce"}
    for link in links.values():
        assert 1e-6 < link.latency < 1e-3, "seconds"
        assert 1e9 < link.bytes_per_second < 1e12


@pytest.mark.parametrize("text", ["", "{", "[]", '{"topology": "x", "costs": []}'])
def test_other_text_is_no_table(text: str) -> None:
    with pytest.raises(ValueError, match="no table of collectives"):
        loads(text)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"collective": "gossip"}, "collective 'gossip'"),
        ({"algorithm": "pigeons"}, "algorithm 'pigeons'"),
        ({"dtype": "float31"}, "dtype 'float31'"),
        ({"alpha": -1.0}, "alpha of all_gather"),
        ({"beta": float("inf")}, "beta of all_gather"),
        ({"beta": float("nan")}, "beta of all_gather"),
        ({"beta": "fast"}, "'<=' not supported"),
    ],
    ids=str,
)
def test_every_entry_of_a_table_is_looked_at(entry: dict[str, Any], said: str) -> None:
    table = _table(FAST, SLOW)
    broken = dataclasses.replace(table.costs[1], **entry)
    text = dataclasses.replace(table, costs=(*table.costs, broken)).dumps()
    with pytest.raises(ValueError, match=re.escape(said)):
        loads(text)


def test_a_machine_has_the_buckets_of_its_table() -> None:
    machine = machine_of("cpu", _table(FAST, SLOW))
    assert machine.most_bucket_bytes == 2_000_000
    assert machine.with_link(Link(1.0, 2.0)).most_bucket_bytes == MOST_BUCKET_BYTES


@pytest.fixture(scope="module")
def gpt() -> Rehearsal:
    return rehearse(2)


def _measured(cache: str, ranks_per_node: int) -> tuple[CommTable, bool]:
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cpu")
    comm = make_comm(group, device, ranks_per_node)
    table = calibrate(comm, device, sizes=(1 << 12, 1 << 16), repeats=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROFX_CACHE", f"{cache}/{dist.get_rank()}")
        path = save_table(table)
        return table, loads(path.read_text()) == table and path == table_path(table.topology)


def test_every_algorithm_is_measured_and_kept(tmp_path: Path) -> None:
    for table, kept in run_ranks(4, _measured, str(tmp_path), 2):
        assert kept
        assert table.topology.startswith("gloo-cpu-2x2-torch2.")
        ways = {(cost.collective, cost.algorithm, cost.dtype) for cost in table.costs}
        assert len(ways) == len(table.costs) == 2 * 3 * 2 + 2 + 2
    for table, _ in run_ranks(4, _measured, str(tmp_path), 4):
        assert {cost.algorithm for cost in table.costs} == {"native", "point_to_point"}


def _exchanged() -> list[list[int]]:
    """With whom codes are exchanged while that is measured."""
    assert dist.group.WORLD is not None
    device = torch.device("cpu")
    comm = make_comm(dist.group.WORLD, device, 2)
    with patch.object(collectives, "all_to_all", wraps=collectives.all_to_all) as calls:
        calibrate(comm, device, sizes=(1 << 12,), repeats=1)
    return [list(call.args[1]) for call in calls.call_args_list]


def test_codes_are_exchanged_in_two_hops_between_nodes() -> None:
    _, found, *_ = run_ranks(4, _exchanged)
    assert found == 4 * [[0, 1], [1, 3]], "by native calls, and by messages, two of each"


def _train(
    cache: str, options: dict[str, Any], assumed: CommTable | None = None
) -> tuple[Algorithms, int]:
    """Only rank 0 finds a table, or computes one."""
    first = dist.get_rank() == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROFX_CACHE", cache if first else os.devnull)
        patch.setattr(network, "assumed_table", lambda *_: assumed if first else None)
        pair = Pair(make("gpt"), 3, {**EAGER, **options})
        pair.train(lambda run, number: run(*batch("gpt", dist.get_rank(), number)), 2)
    session = session_of(pair.model)
    assert session is not None and session.sharded.shard_comm is not None
    table = session.network.table
    return session.sharded.shard_comm.algorithms, table.bucket_bytes() if table else 0


def _keep(table: CommTable, cache: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROFX_CACHE", str(cache))
        return save_table(table)


def test_ranks_train_by_the_table_of_rank_0(tmp_path: Path) -> None:
    _keep(_table(FAST, SLOW), tmp_path)
    wanted = (Algorithms("native", "point_to_point"), 2_000_000)
    assert run_ranks(2, _train, str(tmp_path), {}) == [wanted, wanted]


def test_ranks_train_by_what_rank_0_computes(tmp_path: Path) -> None:
    assumed = dataclasses.replace(_table(FAST, SLOW), measured=False)
    wanted = (Algorithms("native", "point_to_point"), 2_000_000)
    assert run_ranks(2, _train, str(tmp_path), {}, assumed) == [wanted, wanted]


@pytest.mark.parametrize("broken", ["short", "empty", "bytes", "folder"])
def test_a_broken_table_is_named_on_all_ranks(broken: str, tmp_path: Path) -> None:
    path = _keep(_table(FAST, SLOW), tmp_path)
    content = {"short": path.read_bytes()[:-9], "empty": b"", "bytes": b"\xff"}.get(broken)
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(RanksFailed, match=r"zerofx bench comm") as failed:
        run_ranks(2, _train, str(tmp_path), {})
    failures = failed.value.failures
    assert {number: each.kind for number, each in failures.items()} == dict.fromkeys(
        range(2), "ConfigError"
    )
    assert all(path.name in each.message for each in failures.values())


def test_groups_that_lie_otherwise_go_by_the_defaults(tmp_path: Path) -> None:
    other = dataclasses.replace(_table(FAST, SLOW), topology="gloo-cpu-1x3-torch9.9")
    assert _keep(other, tmp_path).name == "gloo-cpu-1x3-torch9.9.json"
    default = (Algorithms("point_to_point", "point_to_point"), 0)
    assert run_ranks(2, _train, str(tmp_path), {}) == [default, default]
