"""What a step of given programs sends, takes and holds: one set of options on one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from zerofx.config import ZeroConfig
from zerofx.cost.forecast import Peak
from zerofx.cost.machine import Machine
from zerofx.cost.memory import FP32_ADAM
from zerofx.cost.micro_batches import MicroBatches
from zerofx.debug.runs import GraphRuns, runs_of, starts_of
from zerofx.frontend.dump import Reader
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.frontend.resident import rest_of, update_seconds
from zerofx.frontend.views import (
    Programs,
    Times,
    coded_in,
    forecast_of,
    timeline_of,
    timelines,
    times_of,
)
from zerofx.ir.codes import wire_dtype
from zerofx.ir.facts import facts
from zerofx.ir.ops import STARTS
from zerofx.ir.spec import ParamSpec
from zerofx.ir.text import node_names


@dataclasses.dataclass(frozen=True)
class Setting:
    """With what options, on what machine.

    Attributes:
        config: stage and options.
        num_ranks: W.
        machine: of one rank, and its link.
        memory_bytes: that a rank may use; `None`: nobody said.
    """

    config: ZeroConfig
    num_ranks: int
    machine: Machine
    memory_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """One collective of a step, all of its runs together; seconds.

    Attributes:
        graph: number of the graph.
        region: `forward` or `backward`.
        name: of its start, as programs print it.
        members: parameters that it moves.
        wire_dtype: of what it sends: a dtype or a codec, two for two hops.
        wire_bytes: that a rank sends.
        scale_bytes: of these, the scales of codes.
        across_bytes: of these, what leaves the rank's node.
        seconds: that the link is busy with it.
        exposed: of these, how long nothing is computed.
        begin: when it begins, from the begin of its program.
        runs: how often a step runs it; where gradients are held back, once for several backwards.
    """

    graph: int
    region: str
    name: str
    members: tuple[str, ...]
    wire_dtype: str
    wire_bytes: int
    scale_bytes: int
    across_bytes: int
    seconds: float
    exposed: float
    begin: float
    runs: float

    @property
    def hidden(self) -> float:
        """Seconds behind computation."""
        return self.seconds - self.exposed


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A step.

    Attributes:
        times: predicted seconds.
        peak: the moment at which a rank holds most, with AdamW.
        sent_bytes: that a rank sends.
        num_collectives: that it takes part in, those that send nothing left out.
    """

    times: Times
    peak: Peak
    sent_bytes: int
    num_collectives: int


def programs_of(
    rehearsals: Sequence[Rehearsal], setting: Setting, readers: Sequence[Reader] = ()
) -> list[Programs]:
    """Forward and backward of each graph, after all passes.

    Args:
        rehearsals: the graphs of a step.
        setting: with what options.
        readers: of each graph, who is told of its passes; or empty.
    """
    told: Sequence[Sequence[Reader]] = [[r] for r in readers] or [[] for _ in rehearsals]
    return [
        each.programs(setting.config, setting.num_ranks, who, setting.machine)
        for each, who in zip(rehearsals, told, strict=True)
    ]


def outcome_of(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal], setting: Setting
) -> Outcome:
    """What these programs do."""
    machine, fused = setting.machine, setting.config.inner == "inductor"
    graphs, times = runs_of(programs, rehearsals, setting.config), Times(0.0, 0.0)
    for graph in graphs:
        times = times.plus(_times(graph, setting), 1.0)
    many = sum(each.runs for each in rehearsals) > 1
    laid, resident = rest_of(
        _all_params(rehearsals),
        setting.config,
        setting.num_ranks,
        precision=FP32_ADAM,
        buffers=max((each.buffer_bytes for each in rehearsals), default=0),
        device=machine.device,
        coded=coded_in(programs),
        accumulates=many,
    )
    update = update_seconds(laid, resident, machine)
    micro_batches = MicroBatches.of(setting.config)
    sent = [each for graph in graphs for each in graph.traveled(micro_batches).values()]
    peaks: list[Peak] = []
    earlier = 0  # what the graphs before this one keep for their backward
    for graph, each in zip(graphs, rehearsals, strict=True):
        forecast, held = forecast_of(
            graph.programs,
            resident,
            machine.algorithms,
            fused=fused,
            accumulates=many,
            kept=graph.kept,
        )
        peak, left = forecast.peak(1), sum(held.values.values())
        earlier += (each.nested - 1) * left
        if peak.phase != "optimizer step":
            more = {"activations": earlier, "gathered": graph.kept_by_others}
            sums = {name: getattr(peak, name) + size for name, size in more.items()}
            peak = dataclasses.replace(peak, **sums)
        peaks.append(peak)
        earlier += left
    return Outcome(
        dataclasses.replace(times, update=update),
        max(peaks, key=lambda peak: peak.total),
        round(sum(each.wire_bytes for each in sent)),
        round(sum(each.runs for each in sent)),
    )


def collective_times(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal], setting: Setting
) -> list[CollectiveTime]:
    """All collectives in order, those left out that send nothing."""
    fused = setting.config.inner == "inductor"
    out: list[CollectiveTime] = []
    micro_batches = MicroBatches.of(setting.config)
    for number, graph in enumerate(runs_of(programs, rehearsals, setting.config)):
        sent = graph.traveled(micro_batches)
        spent = _spent(graph, micro_batches, setting.machine, fused=fused)
        starts = {at: start for start, at in starts_of(graph.programs).items()}
        names = [node_names(program) for program in graph.programs]
        for at in sorted(sent, key=lambda at: (at[0], spent[at].begin)):
            program, start, found, busy = graph.programs[at[0]], starts[at], sent[at], spent[at]
            record = facts(start)
            out.append(
                CollectiveTime(
                    number,
                    program.region.value,
                    names[at[0]][start],
                    record.members,
                    wire_dtype(program, start),
                    round(found.wire_bytes),
                    round(found.runs * record.scale_bytes),
                    round(found.across_bytes),
                    busy.seconds,
                    busy.exposed,
                    busy.begin,
                    found.runs,
                )
            )
    return out


@dataclasses.dataclass
class _Spent:
    """Seconds of all runs of a collective; see `CollectiveTime`."""

    begin: float
    seconds: float = 0.0
    exposed: float = 0.0


def _spent(
    graph: GraphRuns, micro_batches: MicroBatches, machine: Machine, *, fused: bool
) -> dict[tuple[int, int], _Spent]:
    """By program and place among its collectives."""
    found: dict[tuple[int, int], _Spent] = {}
    for kind in graph.kinds:
        sent, starts = kind.traveled(micro_batches), starts_of(kind.programs)
        for timeline in timelines(kind.programs, machine, fused=fused, left=kind.left):
            for span, exposed in timeline.exposure():
                if (at := starts[span.node]) in sent:
                    spent = found.setdefault(at, _Spent(span.begin))
                    spent.seconds += sent[at].runs * (span.end - span.begin)
                    spent.exposed += sent[at].runs * exposed
    return found


def _times(graph: GraphRuns, setting: Setting) -> Times:
    """All runs of a graph in a step: those that send everything, and those that send less."""
    fused, micro_batches = setting.config.inner == "inductor", MicroBatches.of(setting.config)
    times = Times(0.0, 0.0)
    for kind in graph.kinds:
        sent, starts = kind.traveled(micro_batches), starts_of(kind.programs)
        for program, left in zip(kind.programs, kind.left, strict=True):
            places = {start: starts[start] for start in program.calls(*STARTS)}
            own = {start: sent[at].runs for start, at in places.items() if at in sent}
            before = 0.0
            for often in sorted({*own.values(), kind.number}):
                silent = {start for start, number in own.items() if number < often}
                line = timeline_of(program, setting.machine, left, fused=fused, silent=silent)
                times, before = times.plus(times_of([line]), often - before), often
    return times


def _all_params(rehearsals: Sequence[Rehearsal]) -> list[ParamSpec]:
    """Of all models; graphs of one model share its parameters."""
    found = {each.params: None for each in rehearsals}
    return [spec for params in found for spec in params]
