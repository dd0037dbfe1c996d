"""What a step of given programs sends, takes and holds: one set of options on one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import fx

from zerofx.config import ZeroConfig
from zerofx.cost.forecast import Peak
from zerofx.cost.machine import Machine, left_to
from zerofx.cost.memory import FP32_ADAM
from zerofx.frontend.dump import Reader
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.frontend.resident import is_hybrid, rest_of, update_seconds
from zerofx.frontend.views import (
    Programs,
    Times,
    coded_in,
    forecast_of,
    sending,
    timeline_of,
    timelines,
    times_of,
)
from zerofx.ir.codes import all_reduced_bytes, wire_dtype
from zerofx.ir.facts import facts
from zerofx.ir.ops import REDUCE_START, is_call
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout, ParamSpec
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
    gathered, times = _gathered_earlier(programs, rehearsals), Times(0.0, 0.0)
    graphs = list(zip(programs, rehearsals, gathered, strict=True))
    for both, each, there in graphs:
        times = times.plus(_times(both, each, setting, there), 1.0)
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
    sent = [
        found
        for both, each, there in graphs
        for found in _sending(both, each, setting.config, there)
    ]
    peaks: list[Peak] = []
    earlier = 0  # what the graphs before this one keep for their backward
    for both, each, _ in graphs:
        forecast, held = forecast_of(
            both, resident, machine.algorithms, fused=fused, accumulates=many
        )
        peak, kept = forecast.peak(1), sum(held.values.values())
        earlier += (each.nested - 1) * kept
        if peak.phase != "optimizer step":
            peak = dataclasses.replace(peak, activations=peak.activations + earlier)
        peaks.append(peak)
        earlier += kept
    return Outcome(
        dataclasses.replace(times, update=update),
        max(peaks, key=lambda peak: peak.total),
        sum(each.wire_bytes for each in sent),
        round(sum(each.runs for each in sent)),
    )


def collective_times(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal], setting: Setting
) -> list[CollectiveTime]:
    """All collectives in order, those left out that send nothing."""
    fused = setting.config.inner == "inductor"
    out: list[CollectiveTime] = []
    gathered = _gathered_earlier(programs, rehearsals)
    graphs = enumerate(zip(programs, rehearsals, gathered, strict=True))
    for number, (both, each, there) in graphs:
        sent = {found.start: found for found in _sending(both, each, setting.config, there)}
        found_timelines = timelines(both, setting.machine, fused=fused, there=there)
        for program, timeline in zip(both, found_timelines, strict=True):
            names = node_names(program)
            for span, exposed in timeline.exposure():
                if (found := sent.get(span.node)) is None:
                    continue
                record, runs = facts(span.node), found.runs
                out.append(
                    CollectiveTime(
                        number,
                        program.region.value,
                        names[span.node],
                        record.members,
                        wire_dtype(program, span.node),
                        found.wire_bytes,
                        round(runs * record.scale_bytes),
                        found.across_bytes,
                        runs * (span.end - span.begin),
                        runs * exposed,
                        span.begin,
                        runs,
                    )
                )
    return out


@dataclasses.dataclass(frozen=True)
class _Sent:
    """What a step sends in one collective.

    Attributes:
        start: of the collective.
        runs: how often.
        wire_bytes: in all of these.
        across_bytes: those that leave the rank's node.
    """

    start: fx.Node
    runs: float
    wire_bytes: int
    across_bytes: int


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


def _sending(
    programs: Programs, rehearsal: Rehearsal, config: ZeroConfig, there: frozenset[str]
) -> Iterator[_Sent]:
    """The collectives that send something."""
    for program, start, sent in sending(programs, there):
        across = program.bytes_across_nodes(start, sent)
        runs = _runs(program, start, rehearsal, config)
        once = rehearsal.runs / config.accumulate
        # On a hybrid mesh the hop between replicas waits for the last backward.
        waits = is_hybrid(config) and once < runs
        shared = all_reduced_bytes(program, start) if waits else 0
        left = shared if _layout(program, start).replicas_apart else 0
        yield _Sent(
            start,
            runs,
            round(runs * (sent - shared) + once * shared),
            round(runs * (across - left) + once * left),
        )


def _runs(program: Program, start: fx.Node, rehearsal: Rehearsal, config: ZeroConfig) -> float:
    """How often a step runs a collective.

    A resident copy is gathered once after each optimizer step, for each of the equal blocks that
    share a graph; gradients that `accumulate` holds back travel once for all.
    """
    layout = _layout(program, start)
    if not is_call(start, REDUCE_START):
        return min(rehearsal.runs, rehearsal.nested) if layout.resident else rehearsal.runs
    held = config.stage < 2 or (is_hybrid(config) and not layout.sharded)
    return rehearsal.runs / config.accumulate if held else rehearsal.runs


def _layout(program: Program, start: fx.Node) -> Layout:
    return program.params[facts(start).members[0]].layout


def _times(
    programs: Programs, rehearsal: Rehearsal, setting: Setting, there: frozenset[str]
) -> Times:
    """All runs of a graph in a step: those that send everything, and those that send less."""
    fused, config = setting.config.inner == "inductor", setting.config
    runs = {each.start: each.runs for each in _sending(programs, rehearsal, config, there)}
    times = Times(0.0, 0.0)
    for program, kept in zip(programs, left_to(programs, there), strict=True):
        own = {start: runs[start] for start in program.graph.nodes if start in runs}
        before = 0.0
        for often in sorted({*own.values(), rehearsal.runs}):
            silent = {start for start, number in own.items() if number < often}
            found = timeline_of(program, setting.machine, kept, fused=fused, silent=silent)
            times, before = times.plus(times_of([found]), often - before), often
    return times


def _all_params(rehearsals: Sequence[Rehearsal]) -> list[ParamSpec]:
    """Of all models; graphs of one model share its parameters."""
    found = {each.params: None for each in rehearsals}
    return [spec for params in found for spec in params]
