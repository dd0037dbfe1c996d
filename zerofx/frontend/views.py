"""One stage's programs, looked at: memory as a function of the batch size, time, traffic."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from torch import fx

from zerofx.cost.comm import Algorithms
from zerofx.cost.compute import Kernels
from zerofx.cost.curve import Curve
from zerofx.cost.forecast import Forecast, Resident
from zerofx.cost.lines import Line, deepen, line_of, line_through
from zerofx.cost.liveness import Held, held_after, live_bytes
from zerofx.cost.machine import Machine, already_whole, left_to
from zerofx.frontend.traffic import NOTHING_SENT, Traffic, traffic
from zerofx.ir.facts import facts
from zerofx.ir.ops import REDUCE_START, UNSHARD_START, codecs, collective_of
from zerofx.ir.program import Program
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.passes.quantize_unshards import QuantizeUnshards
from zerofx.sim.timeline import Timeline, simulate

Programs = tuple[Program, Program]
"""Forward and backward."""


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        compute: kernels of forward and backward.
        exposed: collectives that nothing hides.
        host: kernels wait for Python, or for cores that other ranks use.
        update: the optimizer's step.
    """

    compute: float
    exposed: float
    host: float = 0.0
    update: float = 0.0

    @property
    def programs(self) -> float:
        """Of forward and backward."""
        return self.compute + self.exposed + self.host

    @property
    def step(self) -> float:
        """All of it."""
        return self.programs + self.update

    def plus(self, other: Times, times: float) -> Times:
        """These, and `other` so many times."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Times(*(mine + times * theirs for mine, theirs in pairs))

    def towards(self, other: Times, factor: float) -> Times:
        """What changes from here to `other`, `factor` times as far."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Times(*(mine + factor * (theirs - mine) for mine, theirs in pairs))


@dataclasses.dataclass(frozen=True)
class View:
    """One stage of one model.

    Attributes:
        forward: memory of the forward program.
        backward: of the backward program.
        lasting: inputs and results of the model: bytes at batch size 0, and per sample.
        times: at the batch size that was asked for.
        traffic: what a rank sends per step.
        otherwise: `times` if codes of one kind travelled where they do not, or the other way round.
        read: names of the parameters that forward reads.
    """

    forward: Line
    backward: Line
    lasting: tuple[float, float]
    times: Times
    traffic: Traffic
    otherwise: Mapping[str, Times]
    read: frozenset[str]


def look(
    programs: tuple[Programs, Programs],
    batches: tuple[int, int],
    wanted: int,
    machine: Machine,
    *,
    fused: bool,
    otherwise: Mapping[str, tuple[Programs, Programs]],
) -> View:
    """Look at one stage's programs of two batch sizes.

    Args:
        programs: of each of them.
        batches: the two sizes.
        wanted: the batch size whose time is asked for.
        machine: where they will run.
        fused: whether kernels are fused, as Inductor does.
        otherwise: programs of these sizes, one kind of codes decided otherwise.

    Raises:
        NotAlikeError: the programs depend on the batch size by more than their shapes.
    """

    def timed(both: tuple[Programs, Programs]) -> Times:
        base, more = (times_of(timelines(each, machine, fused=fused)) for each in both)
        return base.towards(more, (wanted - batch) / (batch2 - batch))

    batch, batch2 = batches
    (forward, backward, held), (forward2, backward2, held2) = (
        _curves(each, machine.algorithms, fused) for each in programs
    )
    lasting, lasting2 = (sum(h.values[piece] for piece in h.lasting) for h in (held, held2))
    slope = (lasting2 - lasting) / (batch2 - batch)
    return View(
        line_through(forward, batch, forward2, batch2),
        line_through(backward, batch, backward2, batch2),
        (lasting - batch * slope, slope),
        timed(programs),
        traffic(programs[0]),
        {name: timed(both) for name, both in otherwise.items()},
        frozenset(programs[0][0].params),
    )


def forecast_of(
    programs: Programs,
    resident: Resident,
    algorithms: Algorithms,
    *,
    fused: bool,
    accumulates: bool,
    kept: Collection[str] | None = None,
) -> tuple[Forecast, Held]:
    """The memory of programs of one batch size, in batches of that size; and what forward leaves.

    Args:
        programs: after all passes.
        resident: what lives all the time.
        algorithms: which calls move a bucket.
        fused: whether kernels are fused, as Inductor does.
        accumulates: see `live_bytes`.
        kept: parameters that backward finds whole; by default all that forward keeps.
    """
    forward, backward, held = _curves(programs, algorithms, fused, accumulates, kept)
    lasting = sum(held.values[piece] for piece in held.lasting)
    return Forecast(resident, line_of(forward), line_of(backward), (lasting, 0.0)), held


def coded_in(programs: Iterable[Programs]) -> frozenset[str]:
    """Names of the passes whose codes travel in some of them."""
    calls = {QuantizeUnshards.name: UNSHARD_START, QuantizeReduces.name: REDUCE_START}
    every = [program for both in programs for program in both]
    return frozenset(
        name
        for name, call in calls.items()
        if any(codecs(start) for program in every for start in program.calls(call))
    )


def grow(few: View, more: View, blocks: tuple[int, int, int], stage: int) -> View:
    """The view of a deep model, from those of two shallow ones.

    Args:
        few: of `blocks[0]` blocks.
        more: of `blocks[1]` blocks.
        blocks: how many blocks they have, and the deep model.
        stage: ZeRO stage.
    """
    factor = (blocks[2] - blocks[0]) / (blocks[1] - blocks[0])

    def grown(small: float, large: float) -> float:
        return small + factor * (large - small)

    return View(
        deepen(few.forward, more.forward, blocks, few_grads=stage > 1),
        deepen(few.backward, more.backward, blocks, few_grads=stage > 1),
        (grown(few.lasting[0], more.lasting[0]), grown(few.lasting[1], more.lasting[1])),
        few.times.towards(more.times, factor),
        {
            key: (grown(one[0], two[0]), grown(one[1], two[1]), grown(one[2], two[2]))
            for key in {**few.traffic, **more.traffic}
            for one, two in [
                (few.traffic.get(key, NOTHING_SENT), more.traffic.get(key, NOTHING_SENT))
            ]
        },
        {
            name: times.towards(more.otherwise[name], factor)
            for name, times in few.otherwise.items()
        },
        more.read,
    )


def gathered_before(programs: Programs) -> set[fx.Node]:
    """Gathers that send nothing: the values are frozen and resident, or in backward there."""
    found = set[fx.Node]()
    for program, kept in zip(programs, left_to(programs), strict=True):
        whole = already_whole(program, kept)
        starts = program.calls(UNSHARD_START)
        found.update(start for start in starts if whole.issuperset(facts(start).members))
    return found


def timelines(
    programs: Programs,
    machine: Machine,
    *,
    fused: bool,
    left: tuple[frozenset[str], frozenset[str]] | None = None,
) -> tuple[Timeline, Timeline]:
    """Forward and backward in simulated time.

    Args:
        programs: after all passes.
        machine: where they will run.
        fused: whether kernels are fused, as Inductor does.
        left: parameters that are whole as each begins; by default what forward keeps.
    """
    pairs = zip(programs, left or left_to(programs), strict=True)
    forward, backward = (timeline_of(each, machine, kept, fused=fused) for each, kept in pairs)
    return forward, backward


def timeline_of(
    program: Program,
    machine: Machine,
    kept: frozenset[str],
    *,
    fused: bool,
    silent: Collection[fx.Node] = frozenset(),
) -> Timeline:
    """One program in simulated time.

    Args:
        program: after all passes.
        machine: where it will run.
        kept: parameters that earlier programs of the step left whole.
        fused: whether kernels are fused, as Inductor does.
        silent: starts of collectives that send nothing this time.
    """
    whole = already_whole(program, kept)

    def link(node: fx.Node) -> float:
        return 0.0 if node in silent else machine.link_seconds(program, node, whole)

    def codes(node: fx.Node) -> float:
        start = collective_of(node)
        return 0.0 if start in silent else machine.code_seconds(program, node, whole)

    kernels = Kernels(program.graph, machine.roofline, fused=fused)
    return simulate(program, kernels.seconds, link, codes, machine.host, whole)


def times_of(timelines: Iterable[Timeline]) -> Times:
    """Their sum, without the optimizer's step."""
    found = list(timelines)
    compute, host = sum(t.compute_seconds for t in found), sum(t.host_seconds for t in found)
    return Times(compute, sum(t.seconds for t in found) - compute - host, host)


def _curves(
    programs: Programs,
    algorithms: Algorithms,
    fused: bool,
    accumulates: bool = False,
    kept: Collection[str] | None = None,
) -> tuple[Curve, Curve, Held]:
    forward, backward = programs
    held = held_after(forward, algorithms, fused=fused)
    if kept is not None:
        found = {name: size for name, size in held.kept.items() if name in kept}
        held = dataclasses.replace(held, kept=found)
    return (
        live_bytes(forward, algorithms, fused=fused),
        live_bytes(backward, algorithms, fused=fused, before=held, accumulates=accumulates),
        held,
    )
