"""`quantize="auto"`: whether codes save more time on the link than their kernels take.

A graph's programs are made with and without codes, and run in simulated time: what computation
hides saves nothing, and kernels are never hidden. Passes and cost model are pure, but sizes may
differ from rank to rank: `zerofx.frontend.capture` lets rank 0 decide.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from zerofx.cost.machine import Machine, kept_by
from zerofx.frontend.joint import copy_module
from zerofx.frontend.views import timeline_of
from zerofx.ir import ops
from zerofx.ir.codes import exact_bytes
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.passes.base import Pass, run_passes
from zerofx.passes.quantize import BucketCost, Weighed
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.passes.quantize_unshards import QuantizeUnshards
from zerofx.sim.timeline import Timeline

Weighing = Mapping[str, Weighed]
"""By name of a pass that quantizes, whether its codes pay."""

CODING = (QuantizeUnshards, QuantizeReduces)
"""The passes that quantize."""

WORTH = 0.02
"""Codes round: they must make a graph at least this much faster, or numbers travel."""


def weigh(
    passes: Sequence[Pass], programs: Sequence[Program], machine: Machine, *, fused: bool
) -> Weighing:
    """Try the programs with and without each kind of codes.

    Args:
        passes: the pipeline.
        programs: forward and backward, or an inference program, before their passes.
        machine: where they will run.
        fused: whether kernels are fused, as Inductor does.
    """
    regions = {program.region for program in programs}
    names = [each.name for each in passes if isinstance(each, CODING) and regions & each.regions]
    trials = {
        chosen: _Trial(_with_codes(passes, chosen), programs, machine, fused)
        for number in range(len(names) + 1)
        for chosen in itertools.combinations(names, number)
    }
    best: tuple[str, ...] = ()
    for chosen, trial in trials.items():
        if trial.seconds < (1 - WORTH) * trials[best].seconds:
            best = chosen
    return {
        name: Weighed(
            name in best,
            trials[tuple(each for each in best if each != name)].seconds,
            (coded := trials[tuple(n for n in names if n == name or n in best)]).seconds,
            tuple(coded.buckets(name)),
        )
        for name in names
    }


def decided(passes: Sequence[Pass], weighing: Weighing) -> tuple[Pass, ...]:
    """The pipeline that knows what was decided."""
    return tuple(
        dataclasses.replace(each, weighed=weighing[each.name])
        if isinstance(each, CODING) and each.name in weighing
        else each
        for each in passes
    )


def pays(weighing: Weighing, name: str) -> bool:
    """Whether the codes of a pass are sent: they are, unless it was weighed and they do not pay."""
    return name not in weighing or weighing[name].pays


def otherwise(weighing: Weighing) -> dict[str, Weighing]:
    """For each kind of codes, what was decided of the others, and the opposite of it."""
    return {
        name: {**weighing, name: dataclasses.replace(each, pays=not each.pays)}
        for name, each in weighing.items()
    }


def with_seconds(weighing: Weighing, seconds: float, others: Mapping[str, float]) -> Weighing:
    """The same decisions with the times of another depth or batch.

    Args:
        weighing: what was decided.
        seconds: of forward and backward.
        others: with one kind of codes decided otherwise.
    """
    return {
        name: dataclasses.replace(
            each,
            exact=others[name] if each.pays else seconds,
            coded=seconds if each.pays else others[name],
        )
        for name, each in weighing.items()
    }


def dumps(weighing: Weighing) -> str:
    """As JSON, for other ranks."""
    return json.dumps({name: dataclasses.asdict(each) for name, each in weighing.items()})


def loads(text: str) -> Weighing:
    """What `dumps` wrote."""
    return {name: _weighed(**fields) for name, fields in json.loads(text).items()}


def _weighed(buckets: Sequence[dict[str, Any]], **fields: Any) -> Weighed:
    made = (BucketCost(**{**each, "members": tuple(each["members"])}) for each in buckets)
    return Weighed(**fields, buckets=tuple(made))


def _with_codes(passes: Sequence[Pass], chosen: Sequence[str]) -> list[Pass]:
    return [each for each in passes if each.name in chosen or not isinstance(each, CODING)]


class _Trial:
    """The programs with some kinds of codes, in simulated time.

    Attributes:
        seconds: of all of them.
    """

    def __init__(
        self, passes: Sequence[Pass], programs: Sequence[Program], machine: Machine, fused: bool
    ) -> None:
        self._machine = machine
        self._runs: list[tuple[Program, Timeline]] = []
        kept = frozenset[str]()
        for each in programs:
            program = dataclasses.replace(each, module=copy_module(each.module))
            run_passes(program, passes, check=False)
            self._runs.append((program, timeline_of(program, machine, kept, fused=fused)))
            kept = kept_by(program)
        self.seconds = sum(timeline.seconds for _, timeline in self._runs)

    def buckets(self, name: str) -> Iterator[BucketCost]:
        """What the codes of one pass take, bucket by bucket."""
        op = ops.REDUCE_START if name == QuantizeReduces.name else ops.UNSHARD_START
        kind = "reduce" if op is ops.REDUCE_START else "unshard"
        links = self._machine.links
        exact = links["reduce_scatter"] if op is ops.REDUCE_START else links["all_gather"]
        for program, timeline in self._runs:
            taken = _seconds_of(timeline)
            for start in program.calls(op):
                on_link = taken.get((start, "link"), 0.0)
                if not ops.codecs(start) or not on_link:
                    continue
                nodes = (start, *ops.waits_of(start))
                yield BucketCost(
                    kind,
                    facts(start).members,
                    exact.seconds_of(exact_bytes(program, start)),
                    on_link,
                    sum(taken.get((node, "compute"), 0.0) for node in nodes),
                    sum(taken.get((node, "stall"), 0.0) for node in nodes),
                )


def _seconds_of(timeline: Timeline) -> dict[tuple[fx.Node, str], float]:
    return {(span.node, span.stream): span.end - span.begin for span in timeline.spans}
