"""`Room` against a walk that adds up what is there."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.passes.models import compile_all
from tests.passes.test_optional import layers
from zerofx.config import ZeroConfig
from zerofx.ir import ops
from zerofx.ir.codes import held_bytes
from zerofx.ir.program import Program
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes.pipelines import pipeline
from zerofx.passes.room import Gathered, Room


@dataclasses.dataclass(frozen=True)
class Walk:
    """Gathers in the order of their need, each freed at a gap; all gaps count."""

    gathers: tuple[Gathered, ...]
    freed_at: tuple[int, ...]

    def room(self) -> Room:
        freed: dict[int, int] = {}
        for each, gap in zip(self.gathers, self.freed_at, strict=True):
            freed[gap] = freed.get(gap, 0) + each.full
        return Room(self.gathers, range(max(self.freed_at) + 1), freed)

    def most(self, gap: int, number: int) -> int:
        """From `gap`, where a gather and all before it have started, until its values are there."""
        moments = [(at, 0) for at in range(gap, self.gathers[number].needed + 1)]
        moments += [
            (each.needed, place + 1)
            for place, each in enumerate(self.gathers[: number + 1])
            if each.needed >= gap
        ]
        return max(self._at(at, done, number + 1) for at, done in moments)

    def _at(self, gap: int, done: int, started: int) -> int:
        """Behind the frees at a gap and the waits of the first `done` gathers."""
        total = 0
        for place, each in enumerate(self.gathers[:started]):
            here = place < done or each.needed < gap
            total += each.full if here else each.arriving
            total -= each.full if self.freed_at[place] <= gap else 0
        return total


@st.composite
def walks(draw: st.DrawFn) -> Walk:
    gaps = sorted(draw(st.lists(st.integers(0, 6), min_size=1, max_size=7)))
    gathers: list[Gathered] = []
    for gap in gaps:
        full = draw(st.integers(0, 20))
        gathers.append(Gathered(gap, draw(st.sampled_from([full, full // 4])), full))
    return Walk(tuple(gathers), tuple(draw(st.integers(gap + 1, 9)) for gap in gaps))


@given(walks(), st.data())
def test_most_bytes_are_those_of_a_walk(walk: Walk, data: st.DataObject) -> None:
    room, gap = walk.room(), 0
    for number, each in enumerate(walk.gathers):
        gap = data.draw(st.integers(min(gap, each.needed), each.needed))
        assert room.wanted(gap, number) == walk.most(gap, number)
    last = {each.needed: number for number, each in enumerate(walk.gathers)}
    assert walk.room().least == max(walk.most(gap, number) for gap, number in last.items())


def _most_in_flight(program: Program) -> int:
    """Codes until they are read, values until they are freed."""
    changes: dict[Any, int] = {}
    for start in program.calls(ops.UNSHARD_START):
        waits, codes = ops.waits_of(start), held_bytes(program, start)
        full = program.full_bytes(start)
        changes[start] = codes or full
        if codes:
            changes[waits[0]] = full - codes
    for free in program.calls(ops.FREE, ops.KEEP):
        changes[free] = -program.full_bytes(free)
    live = most = 0
    for node in program.graph.nodes:
        live += changes.get(node, 0)
        most = max(most, live)
    return most


def test_a_budget_bounds_codes_and_values() -> None:
    def compiled(budget: int | None, codec: str | None) -> Program:
        model = layers([64] * 6, range(6), 0, 3, 2)
        config = ZeroConfig(
            stage=3, bucket_bytes=4500, prefetch_bytes=budget, quantize_weights=codec
        )
        return compile_all(model, 3, pipeline(config))[0]

    least = _most_in_flight(compiled(0, "int8x32"))
    for budget in (least + 1000, least + 3000, 4 * least):
        assert least < _most_in_flight(compiled(budget, "int8x32")) <= budget
    exact, codes = compiled(None, None), compiled(None, "int8x32")
    assert peak_full_bytes(codes) <= _most_in_flight(codes) <= _most_in_flight(exact)

    def ahead(program: Program) -> int:
        """Most gathers under way at once."""
        under_way = most = 0
        for node in program.graph.nodes:
            under_way += ops.is_call(node, ops.UNSHARD_START)
            start = ops.collective_of(node)
            if start is not None and start is not node and ops.waits_of(start)[0] is node:
                under_way -= ops.is_call(start, ops.UNSHARD_START)
            most = max(most, under_way)
        return most

    assert ahead(codes) >= ahead(exact) + 2
