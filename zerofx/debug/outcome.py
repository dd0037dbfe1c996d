"""What a step of given programs sends, takes and holds: one set of options on one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from zerofx.config import ZeroConfig
from zerofx.cost.forecast import Forecast, Peak
from zerofx.cost.lines import line_of
from zerofx.cost.liveness import held_after, live_bytes
from zerofx.cost.memory import FP32_ADAM
from zerofx.frontend.dump import Reader
from zerofx.frontend.planner import Machine
from zerofx.frontend.rehearsal import Rehearsal, lay_out
from zerofx.frontend.resident import resident_of, update_seconds
from zerofx.frontend.views import (
    Programs,
    Times,
    gathered_before,
    timelines,
    times_of,
)
from zerofx.ir.codes import wire_dtype
from zerofx.ir.facts import facts
from zerofx.ir.ops import REDUCE_START, UNSHARD_START, keeps_codes
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
        runs: how often a step runs it.
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
    graphs, times = list(zip(programs, rehearsals, strict=True)), Times(0.0, 0.0)
    for both, each in graphs:
        times = times.plus(times_of(timelines(both, machine, fused=fused)), each.runs)
    params = _all_params(rehearsals)
    gathers = [start for forward, _ in programs for start in forward.calls(UNSHARD_START)]
    coded = any(map(keeps_codes, gathers))
    laid = lay_out(params, setting.config, setting.num_ranks, codes_are_kept=coded)
    buffers = max((each.buffer_bytes for each in rehearsals), default=0)
    many = sum(each.runs for each in rehearsals) > 1
    resident = resident_of(laid, FP32_ADAM, buffers, machine.device, accumulates=many)
    update = update_seconds(laid, resident, machine)
    sending = [(each.runs, start) for both, each in graphs for start in _sending(both)]
    peaks: list[Peak] = []
    earlier = 0  # what the graphs before this one keep for their backward
    for (forward, backward), each in graphs:
        held = held_after(forward, machine.algorithms, fused=fused)
        forecast = Forecast(
            resident,
            line_of(live_bytes(forward, machine.algorithms, fused=fused)),
            line_of(
                live_bytes(backward, machine.algorithms, fused=fused, before=held, accumulates=many)
            ),
            (sum(held.values[piece] for piece in held.lasting), 0.0),
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
        sum(round(runs * facts(start).wire_bytes) for runs, start in sending),
        round(sum(runs for runs, _ in sending)),
    )


def collective_times(
    programs: Sequence[Programs], rehearsals: Sequence[Rehearsal], setting: Setting
) -> list[CollectiveTime]:
    """All collectives in order, those of backward that send nothing left out."""
    fused = setting.config.inner == "inductor"
    out: list[CollectiveTime] = []
    for number, (both, each) in enumerate(zip(programs, rehearsals, strict=True)):
        already, runs = gathered_before(both), each.runs
        for program, timeline in zip(
            both, timelines(both, setting.machine, fused=fused), strict=True
        ):
            names = node_names(program)
            for span, exposed in timeline.exposure():
                record = facts(span.node)
                if span.node in already or not record.wire_bytes:
                    continue
                out.append(
                    CollectiveTime(
                        number,
                        program.region.value,
                        names[span.node],
                        record.members,
                        wire_dtype(program, span.node),
                        round(runs * record.wire_bytes),
                        round(runs * record.scale_bytes),
                        round(runs * program.bytes_across_nodes(span.node)),
                        runs * (span.end - span.begin),
                        runs * exposed,
                        span.begin,
                        runs,
                    )
                )
    return out


def kept_bytes(programs: Sequence[Programs]) -> int:
    """Full values of all gathers of the forwards: what `memory_budget` could keep at most."""
    return sum(
        forward.full_bytes(start)
        for forward, _ in programs
        for start in forward.calls(UNSHARD_START)
    )


def _sending(programs: Programs) -> list[fx.Node]:
    """Starts of the collectives that send something."""
    already = gathered_before(programs)
    starts = [s for each in programs for s in each.calls(UNSHARD_START, REDUCE_START)]
    return [start for start in starts if start not in already and facts(start).wire_bytes > 0]


def _all_params(rehearsals: Sequence[Rehearsal]) -> list[ParamSpec]:
    """Of all models; graphs of one model share its parameters."""
    found = {each.params: None for each in rehearsals}
    return [spec for params in found for spec in params]
