"""Cores that ranks share: what they do for all is the least time of a program."""

from __future__ import annotations

import dataclasses

import pytest

from tests.passes.golden import apply
from tests.sim.test_timeline import chain
from zerofx.cost.host import Host
from zerofx.cost.processor import FREE_CORES, Processor
from zerofx.ir.facts import facts, set_facts
from zerofx.ir.ops import UNSHARD_START
from zerofx.passes.schedule import Schedule
from zerofx.sim.timeline import Timeline, simulate

KERNELS, MEMBERS, SENT = 6, 3, 16
"""Of the program below: its gathers have one member each, and send so many bytes."""

CROWDED, HALF = Processor(ranks_per_core=2.0), Processor(ranks_per_core=0.5)


def run(
    processor: Processor = FREE_CORES, link: float = 1.0, whole: frozenset[str] = frozenset()
) -> Timeline:
    """Kernels take 4 seconds each."""
    program = chain([4, 4, 4])
    for start in program.calls(UNSHARD_START):
        set_facts(start, dataclasses.replace(facts(start), wire_bytes=SENT))
    apply(program, Schedule())
    host = Host(processor=processor)
    return simulate(program, lambda _: 4.0, lambda _: link, host=host, whole=whole)


@pytest.mark.parametrize(
    ("cost", "times"), [("collective", MEMBERS), ("member", MEMBERS), ("kernel", KERNELS)]
)
def test_ranks_that_outnumber_cores_take_turns(cost: str, times: int) -> None:
    found = run(dataclasses.replace(CROWDED, **{cost: 8.0}))
    # Kernels are timed while all ranks run them: their share of the cores is in their time.
    assert found.seconds == pytest.approx(KERNELS * 4.0 + 2.0 * 8.0 * times)
    assert found.compute_seconds == pytest.approx(KERNELS * 4.0)


def test_no_gather_starts_before_all_ranks_have_entered() -> None:
    found = run(dataclasses.replace(CROWDED, program=8.0))
    assert found.seconds == pytest.approx(2.0 * 8.0 + run().seconds)


def test_bytes_are_work() -> None:
    found = run(dataclasses.replace(CROWDED, gathered=0.5))
    assert found.seconds == pytest.approx(KERNELS * 4.0 + 2.0 * 0.5 * SENT * MEMBERS)
    one_there = run(dataclasses.replace(CROWDED, gathered=0.5), whole=frozenset("a"))
    assert one_there.seconds == pytest.approx(found.seconds - 2.0 * 0.5 * SENT)
    reduced = run(dataclasses.replace(CROWDED, reduced=0.5))
    assert reduced.seconds == run().seconds, "nothing is reduced"


def test_cores_to_spare_take_what_kernels_leave() -> None:
    few = run(dataclasses.replace(HALF, collective=2.0))
    assert few.seconds == pytest.approx(run().seconds), "half of the cores have time for messages"
    many = run(dataclasses.replace(HALF, collective=40.0))
    # Two kernels follow the last wait.
    assert many.seconds == pytest.approx(0.5 * (40.0 * MEMBERS + 4 * 4.0) + 2 * 4.0)
    threads = run(dataclasses.replace(HALF, collective=8.0, threads=2))
    assert threads.seconds == pytest.approx(KERNELS * 4.0 + 0.5 * 8.0 * MEMBERS)


def test_gathers_that_send_nothing_ask_for_nothing() -> None:
    silent = run(dataclasses.replace(CROWDED, collective=8.0, gathered=1.0), link=0.0)
    assert silent.seconds == pytest.approx(KERNELS * 4.0)


def test_kernels_take_longer_on_crowded_cores_only() -> None:
    assert FREE_CORES.crowding == HALF.crowding == 1.0
    assert CROWDED.crowding == 2.0
    assert dataclasses.replace(HALF, threads=8).crowding == 4.0
