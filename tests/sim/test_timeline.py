"""The timeline: what overlaps, what is exposed, what is held; and that schedules are the best."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from tests.hand_program import Hand
from tests.passes.golden import apply
from tests.program_builder import layout_of, specs_of
from zerofx.cost.compute import Roofline, moved_bytes, num_flops
from zerofx.cost.host import Host
from zerofx.ir import ops
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes.schedule import Schedule
from zerofx.sim.timeline import Timeline, simulate

aten = torch.ops.aten
NAMES = ("a", "b", "c", "d")


def chain(rows: list[int], reduced: bool = False) -> Program:
    """One product a parameter, gathered and freed right there; perhaps a gradient reduced after."""
    names = NAMES[: len(rows)]
    params = specs_of({name: (rows[i], 3) for i, name in enumerate(names)}, layout_of(2))
    hand = Hand(params, Region.BACKWARD if reduced else Region.FORWARD)
    shards = [hand.shard(name) for name in names]
    x, outputs = hand.input("x", 2, 3), []
    for shard in shards:
        full = hand.gather(shard)
        y = hand.call(aten.mm.default, x, hand.call(aten.t.default, full))
        x = hand.call(aten.mm.default, y, full)
        hand.free(full)
        if reduced:
            outputs.append(hand.reduced(full, shard))
    return hand.program([x, *outputs])


def run(program: Program, compute: float = 1.0, link: float = 1.0) -> Timeline:
    return simulate(program, lambda _: compute, lambda _: link)


def test_without_prefetch_every_gather_is_exposed() -> None:
    found = run(chain([4, 4, 4]))
    assert [seconds for _, seconds in found.exposed] == [1.0, 1.0, 1.0]
    assert (found.busy_seconds, found.seconds) == (3.0, 9.0)


def test_prefetch_hides_all_but_the_first() -> None:
    program = chain([4, 4, 4])
    apply(program, Schedule())
    found = run(program)
    assert [seconds for _, seconds in found.exposed] == [1.0]
    assert (found.busy_seconds, found.seconds) == (3.0, 7.0)


def test_a_gather_that_sends_nothing_waits_for_no_link() -> None:
    hand = Hand(specs_of(dict.fromkeys("ab", (4, 4)), layout_of(2)), Region.BACKWARD)
    kept, other, x = hand.shard("a"), hand.shard("b"), hand.input("x", 4, 4)
    start = hand.reduction(hand.input("gradient", 4, 4), other)
    y = hand.call(aten.mm.default, x, hand.gather(kept))
    wait = hand.call(ops.REDUCE_WAIT, start, other, param="b")
    program = hand.program([y, wait])
    found = simulate(program, lambda _: 1.0, lambda node: 10.0 if node is start else 0.0)
    assert (found.seconds, found.exposed) == (10.0, ((wait, 9.0),))


def test_a_slow_link_is_the_bound() -> None:
    program = chain([4, 4, 4])
    apply(program, Schedule())
    found = run(program, link=10.0)
    assert found.seconds == 3 * 10 + 2
    links = [(span.begin, span.end) for span in found.spans if span.stream == "link"]
    assert links == [(0.0, 10.0), (10.0, 20.0), (20.0, 30.0)]


@pytest.mark.parametrize("link", [0.5, 1.0, 2.5, 10.0])
def test_what_of_a_collective_is_exposed(link: float) -> None:
    program = chain([4, 4, 4], reduced=True)
    apply(program, Schedule())
    found = run(program, link=link)
    shares = [seconds for _, seconds in found.exposure()]
    assert len(shares) == 6 and shares[0] == link, "nothing is computed before the first gather"
    assert all(0 <= seconds <= link for seconds in shares)
    assert sum(shares) == pytest.approx(found.seconds - found.compute_seconds)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_what_kernels_lose_to_collectives_is_not_hidden(share: float) -> None:
    program = chain([4, 4, 4])
    apply(program, Schedule())
    found = simulate(program, lambda _: 4.0, lambda _: 1.0, host=Host(contention=share))
    # The second and third gather run behind products.
    assert found.seconds == pytest.approx(1.0 + 6 * 4.0 + share * 2.0)
    assert found.compute_seconds == pytest.approx(6 * 4.0)
    hidden = [1.0 - exposed for _, exposed in found.exposure()]
    assert hidden == pytest.approx([0.0, 1.0 - share, 1.0 - share])


def test_python_delays_kernels_unless_it_runs_ahead_of_them() -> None:
    program, host = chain([4, 4, 4]), Host(program=5.0, collective=2.0, member=1.0, kernel=0.5)
    python = 5.0 + 3 * (2.0 + 1.0) + 6 * 0.5
    found = simulate(program, lambda _: 1.0, lambda _: 1.0, host=host)
    # A collective is under way while its wait is being reached.
    assert found.seconds == pytest.approx(python + 6.0 + sum(late for _, late in found.exposed))
    assert found.host_seconds == pytest.approx(python)
    ahead = dataclasses.replace(host, runs_ahead=True)
    slow = simulate(program, lambda _: 100.0, lambda _: 1.0, host=ahead)
    assert slow.host_seconds == pytest.approx(5.0 + 2.0 + 1.0 + 0.5), "before the first kernel"
    fast = simulate(program, lambda _: 0.01, lambda _: 0.01, host=ahead)
    assert fast.seconds == pytest.approx(python, abs=0.1)


def test_a_gather_that_sends_nothing_costs_no_python() -> None:
    found = simulate(chain([4, 4]), lambda _: 1.0, lambda _: 0.0, host=Host(collective=2.0))
    assert found.host_seconds == 0.0


def test_roofline_takes_the_longer_of_arithmetic_and_traffic() -> None:
    (first, *_) = chain([4]).calls(aten.mm.default)
    assert num_flops(first) == 2 * 2 * 3 * 4
    assert moved_bytes(first) == 8 * (2 * 3 + 3 * 4 + 2 * 4)
    assert Roofline(flops=48, bytes_per_second=1e9).seconds(first) == 1.0
    assert Roofline(flops=1e9, bytes_per_second=208).seconds(first) == 1.0
    assert Roofline(profile={first.name: 3.0}).seconds(first) == 3.0


@settings(max_examples=25)
@given(st.data())
def test_no_placement_of_the_gathers_is_faster(data: st.DataObject) -> None:
    """Brute force over all orders that keep the order of use, under the same budget."""
    found, best, _ = _against_all(data, reduced=False)
    assert found == pytest.approx(best)


@settings(max_examples=25)
@given(st.data())
def test_reductions_on_the_same_link_cost_at_most_one_collective(data: st.DataObject) -> None:
    """A gather that starts early may delay a reduction: the schedule knows bytes, not times."""
    found, best, longest = _against_all(data, reduced=True)
    assert best <= found <= best + longest


def _against_all(data: st.DataObject, reduced: bool) -> tuple[float, float, float]:
    """Seconds of the schedule, of the best placement, and of the longest collective."""
    rows = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    budget = data.draw(st.sampled_from([0, 100, 150, 200, 400]))
    program = chain(rows, reduced)
    apply(program, Schedule(prefetch_bytes=budget))
    times = st.integers(1, 6)
    seconds = {node: float(data.draw(times)) for node in program.graph.nodes}
    found = simulate(program, seconds.__getitem__, seconds.__getitem__).seconds
    allowed = max(budget, peak_full_bytes(program))
    best = min(
        simulate(program, seconds.__getitem__, seconds.__getitem__).seconds
        for _ in _placements(program)
        if peak_full_bytes(program) <= allowed
    )
    collectives = program.calls(*ops.STARTS)
    return found, best, max(seconds[node] for node in collectives)


def _placements(program: Program) -> Iterator[None]:
    """Every placement of the gathers' starts; `program` is edited while one is looked at."""
    starts = program.calls(ops.UNSHARD_START)
    body = [n for n in program.graph.nodes if n.op != "placeholder" and n not in starts]
    place = {node: index for index, node in enumerate(body)}
    latest = [min(place[wait] for wait in ops.waits_of(start)) for start in starts]
    for chosen in itertools.product(*(range(last + 1) for last in latest)):
        if list(chosen) == sorted(chosen):
            _put(starts, [body[index] for index in chosen])
            yield


def _put(starts: list[fx.Node], anchors: list[fx.Node]) -> None:
    for start, anchor in zip(starts, anchors, strict=True):
        anchor.prepend(start)
