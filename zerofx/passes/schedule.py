"""When communication starts and ends."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from torch import fx

from zerofx.ir.codes import held_bytes
from zerofx.ir.edit import Editor
from zerofx.ir.ops import (
    FREE,
    KEEP,
    REDUCE_START,
    REDUCE_WAIT,
    UNSHARD_START,
    is_call,
    members,
    waits_of,
)
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import alias_closure, only_returned, positions
from zerofx.passes.base import RUNNING, Pass
from zerofx.passes.room import Gathered, Room
from zerofx.passes.seams import Seams


@dataclasses.dataclass(frozen=True)
class Cut:
    """The communication between two compute segments.

    Attributes:
        before: the compute node, or the output, that follows.
        nodes: communication nodes in order.
    """

    before: fx.Node
    nodes: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """All communication of a program, and why it does not start earlier.

    Attributes:
        cuts: in execution order.
        budget_bytes: most bytes of gathered values, from the start of a gather to its free, where
            codes travel of these until they are read.
        reasons: for each gather that starts after the program's begin, what it waits for.
    """

    cuts: tuple[Cut, ...]
    budget_bytes: int
    reasons: tuple[tuple[fx.Node, str], ...]


@dataclasses.dataclass(frozen=True)
class Schedule(Pass):
    """Gathers start early and reductions end late, at few places.

    A program is cut into compute segments at its communication, so the places are chosen where
    kernels end anyway: next to matrix products. Gathers start as early as the budget allows, in the
    order of their use (ZeRO-Infinity §6.2 prefetches so); reductions start at the first such place
    behind their last gradient, ahead of gathers that are needed later than they, and are waited for
    when others need their memory, or at the end.

    Attributes:
        prefetch_bytes: budget for gathered values, from the start of a gather to its free; codes
            are smaller, until they are read. By default as much as it takes to gather one bucket
            of values ahead of every use.

    Before:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); free(w)
        q = unshard_start([t]); v = unshard_wait(q, t); z = mm(y, v); free(v)
    After:
        p = unshard_start([s]); q = unshard_start([t]); w = unshard_wait(p, s); y = mm(x, w)
        free(w); v = unshard_wait(q, t); z = mm(y, v); free(v)
    """

    prefetch_bytes: int | None = None

    name: ClassVar[str] = "schedule"
    regions: ClassVar[frozenset[Region]] = RUNNING

    def plan(self, program: Program) -> SchedulePlan:
        """Choose the places, then walk over them once."""
        walk = _Walk(program, self.prefetch_bytes)
        return SchedulePlan(tuple(walk.cuts()), walk.budget, tuple(walk.reasons))

    def budget_of(self, plan: SchedulePlan) -> int:
        """That of `prefetch_bytes`, or what the program takes in any case."""
        return plan.budget_bytes

    def apply(self, edit: Editor, plan: SchedulePlan) -> None:
        """Move the nodes; views follow what they view, and those of gradients go to the end."""
        for cut in plan.cuts:
            for node in cut.nodes:
                edit.move_before(node, cut.before)
        place = positions(edit.program.graph)
        for cut in plan.cuts:
            for wait in cut.nodes:
                views = sorted(alias_closure(wait)[1:], key=lambda view: place[view])
                returned = is_call(wait, REDUCE_WAIT) and only_returned(wait)
                for view in views:
                    if returned:
                        edit.move_before(view, edit.program.output)
                    elif place[view] < place[cut.before]:
                        edit.move_before(view, cut.before)


class _Walk:
    """One walk over a program's gaps: what happens in each, in order."""

    def __init__(self, program: Program, prefetch_bytes: int | None) -> None:
        self.seams = Seams(program)
        self.reasons: list[tuple[fx.Node, str]] = []
        self._program = program
        gathers, reductions = program.calls(UNSHARD_START), program.calls(REDUCE_START)
        self._fixed = {g for g in gathers if any(s.op != "placeholder" for s in members(g))}
        self._inner = {r for r in reductions if not all(map(only_returned, waits_of(r)))}
        self._needed = {g: self._place_gather(g) for g in gathers}
        self._gathers = collections.deque(sorted(gathers, key=lambda g: self._needed[g]))
        self._ready: dict[int, list[fx.Node]] = collections.defaultdict(list)
        for start in reductions:
            inner = start in self._inner
            gap = self.seams.gap(start) if inner else self.seams.at_or_after(start)
            self._ready[gap].append(start)
        self._size = {start: program.full_bytes(start) for start in reductions}
        self._frees = self._place_frees()
        # A reduction has the time until the next one begins; gradients of two would be held longer.
        self._reduce_budget = max((self._size[start] for start in reductions), default=0)
        self._gaps = sorted({0, self.seams.end, *self._needed.values(), *self._ready, *self._frees})
        freed = {gap: program.full_bytes(*frees) for gap, frees in self._frees.items()}
        self._room = Room([self._gathered(start) for start in self._gathers], self._gaps, freed)
        # What is needed at once is held in any case; up to there, early starts cost nothing.
        asked = self._room.one_ahead if prefetch_bytes is None else prefetch_bytes
        self.budget = max(asked, self._room.least)
        self._pending: collections.deque[fx.Node] = collections.deque()

    def cuts(self) -> Iterator[Cut]:
        """The communication of each gap; what is needed first starts first."""
        waiting: collections.deque[fx.Node] = collections.deque()
        started = 0
        ready = [*sorted(self._ready), self.seams.end]
        for gap in self._gaps:
            # Where reductions that start here are waited for.
            due = ready[min(bisect.bisect_right(ready, gap), len(ready) - 1)]
            nodes: list[fx.Node] = [*self._frees.get(gap, ())]
            ahead: list[fx.Node] = []
            while self._gathers and self._may_start(self._gathers[0], gap, started):
                start = self._gathers.popleft()
                started += 1
                (nodes if self._needed[start] <= due else ahead).append(start)
                waiting.append(start)
            for start in self._ready.get(gap, ()):
                nodes += self._reduce(start)
            nodes += ahead
            while waiting and self._needed[waiting[0]] == gap:
                nodes += waits_of(waiting.popleft())
            if gap == self.seams.end:
                nodes += (wait for start in self._pending for wait in waits_of(start))
            if nodes:
                yield Cut(self.seams.node(gap), tuple(nodes))

    def _may_start(self, start: fx.Node, gap: int, number: int) -> bool:
        """Whether a gather starts here: needed now, or room for it; says why not otherwise."""
        wanted = self._room.wanted(gap, number)
        if self._needed[start] == gap or (wanted <= self.budget and start not in self._fixed):
            return True
        if not self.reasons or self.reasons[-1][0] is not start:
            self.reasons.append((start, f"{wanted} B in flight, over the budget of {self.budget}"))
        return False

    def _reduce(self, start: fx.Node) -> list[fx.Node]:
        """The start, and the waits that its gradients take the place of.

        In this order the link is never idle while what has arrived is added up.
        """
        inner = start in self._inner
        finished: list[fx.Node] = []
        held = sum(self._size[each] for each in self._pending) + self._size[start]
        while self._pending and (inner or held > self._reduce_budget):
            oldest = self._pending.popleft()
            held -= self._size[oldest]
            finished += waits_of(oldest)
        if inner:
            return [*finished, start, *waits_of(start)]
        self._pending.append(start)
        return [start, *finished]

    def _place_gather(self, start: fx.Node) -> int:
        """The seam before the first use; where it is, if the shard is computed by the program."""
        if start in self._fixed:
            return self.seams.gap(start)
        return min(map(self.seams.at_or_before, waits_of(start)))

    def _place_frees(self) -> dict[int, list[fx.Node]]:
        """Frees go to the next gap that is used anyway; behind the last one, to a seam."""
        used = sorted({*self._needed.values(), *self._ready})
        out: dict[int, list[fx.Node]] = collections.defaultdict(list)
        for free in self._program.calls(FREE, KEEP):
            following = bisect.bisect_left(used, self.seams.gap(free))
            last = following == len(used)
            out[self.seams.at_or_after(free) if last else used[following]].append(free)
        return out

    def _gathered(self, start: fx.Node) -> Gathered:
        """What a gather takes; a resident copy takes nothing."""
        waits = waits_of(start)
        freed = any(user.target in (FREE, KEEP) for wait in waits for user in wait.users)
        full = self._program.full_bytes(start) if freed else 0
        codes = held_bytes(self._program, start) if freed else 0
        return Gathered(self._needed[start], codes or full, full)
