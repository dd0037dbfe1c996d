"""The runs of a step's graphs: what each finds whole, and what all of them send.

A step runs its graphs in order, each as often as equal blocks share it, then their backwards.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from torch import fx

from zerofx.config import ZeroConfig
from zerofx.cost.machine import already_whole, bytes_sent, left_to
from zerofx.cost.micro_batches import MicroBatches, Traveled
from zerofx.frontend.micro_programs import programs_of_micro_batches
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.frontend.views import Programs
from zerofx.ir.facts import facts
from zerofx.ir.ops import KEEP, STARTS
from zerofx.ir.spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of a graph in a step that find and send the same.

    Attributes:
        number: of them.
        programs: that run.
        left: parameters that earlier programs left whole, as forward and backward begin.
        nested: how many runs of the graph precede their backward.
    """

    number: float
    programs: Programs
    left: tuple[frozenset[str], frozenset[str]]
    nested: int

    def traveled(self, micro_batches: MicroBatches) -> dict[tuple[int, int], Traveled]:
        """What is sent, by program and place among its collectives; what sends nothing is left out.

        Args:
            micro_batches: of the step.
        """
        found: dict[tuple[int, int], Traveled] = {}
        for which, (program, left) in enumerate(zip(self.programs, self.left, strict=True)):
            whole = already_whole(program, left)
            for place, start in enumerate(program.calls(*STARTS)):
                if sent := bytes_sent(program, start, whole):
                    found[which, place] = micro_batches.traveled(
                        program, start, sent, self.number, self.nested
                    )
        return found


@dataclasses.dataclass(frozen=True)
class GraphRuns:
    """All runs of a graph in a step.

    Attributes:
        programs: forward and backward of the first micro-batch.
        kinds: of its runs.
        kept: parameters that the last forward leaves to its backward.
        kept_by_others: bytes that forwards before the last one have left then.
    """

    programs: Programs
    kinds: tuple[Runs, ...]
    kept: frozenset[str]
    kept_by_others: int

    def traveled(self, micro_batches: MicroBatches) -> dict[tuple[int, int], Traveled]:
        """What a step sends, as `Runs.traveled` says."""
        found: dict[tuple[int, int], Traveled] = {}
        for kind in self.kinds:
            for at, more in kind.traveled(micro_batches).items():
                found[at] = found.get(at, Traveled()).plus(more)
        return found


def runs_of(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal], config: ZeroConfig
) -> list[GraphRuns]:
    """How a step runs each of its graphs.

    Args:
        programs: of each, after all passes.
        rehearsals: from which they were made.
        config: with which options.
    """
    kept, others = _kept(programs, rehearsals, config.memory_budget or 0)
    gathered = _gathered_earlier(programs, rehearsals)
    return [
        GraphRuns(
            both,
            tuple(_kinds(both, each, there, counts, config.accumulate)),
            frozenset(name for name, count in counts.items() if count),
            beside,
        )
        for both, each, there, counts, beside in zip(
            programs, rehearsals, gathered, kept, others, strict=True
        )
    ]


def _kinds(
    programs: Programs,
    rehearsal: Rehearsal,
    there: frozenset[str],
    kept: Counter[str],
    accumulate: int,
) -> Iterator[Runs]:
    """Runs whose values are kept, or not; later micro-batches where secondary shards are."""
    forward, backward = programs
    before, names = left_to(programs, there)
    firsts = programs_of_micro_batches(forward, accumulate)
    levels = sorted({0, rehearsal.nested, *(kept[name] for name in names - there)})
    for low, high in itertools.pairwise(levels):
        found = there | {name for name in names - there if kept[name] >= high}
        runs = rehearsal.runs * (high - low) / rehearsal.nested
        for program, part in firsts:
            number = runs * part / accumulate
            yield Runs(number, (program, backward), (before, found), rehearsal.nested)


def _kept(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal], budget: int
) -> tuple[list[Counter[str]], list[int]]:
    """For each graph, in how many of its nested runs backward finds what forward kept.

    As `zerofx.runtime.kept` does. And the bytes that others have kept as its last run goes on.
    """
    left: dict[tuple[ParamSpec, ...], list[tuple[int, str, int]]] = {}
    others: list[int] = []
    for number, (both, each) in enumerate(zip(programs, rehearsals, strict=True)):
        mine = left.setdefault(each.params, [])
        keeps = both[0].calls(KEEP)
        own = [(number, facts(node).param, both[0].full_bytes(node)) for node in keeps]
        beside = 0
        for _ in range(each.nested):
            while own and mine and _bytes(mine) + _bytes(own) > budget:
                mine.pop(0)
            beside = sum(map(_bytes, left.values()))
            mine += own
        others.append(beside)
    found = Counter((number, name) for mine in left.values() for number, name, _ in mine)
    counts = [Counter[str]() for _ in programs]
    for (number, name), count in found.items():
        counts[number][name] = count
    return counts, others


def _bytes(kept: Sequence[tuple[int, str, int]]) -> int:
    return sum(size for _, _, size in kept)


def _gathered_earlier(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal]
) -> list[frozenset[str]]:
    """For each graph the resident copies that others of its model gathered in the same step."""
    found: dict[tuple[ParamSpec, ...], frozenset[str]] = {}
    out: list[frozenset[str]] = []
    for both, each in zip(programs, rehearsals, strict=True):
        out.append(before := found.get(each.params, frozenset()))
        if each.runs >= 1:  # in every step
            specs = both[0].params.items()
            found[each.params] = before.union(n for n, spec in specs if spec.layout.resident)
    return out


def starts_of(programs: Programs) -> dict[fx.Node, tuple[int, int]]:
    """The collectives of both programs, each with its program and its place among those there."""
    return {
        start: (which, place)
        for which, program in enumerate(programs)
        for place, start in enumerate(program.calls(*STARTS))
    }
