"""One stage's programs, looked at: memory as a function of the batch size, time, traffic."""

from __future__ import annotations

import dataclasses
from typing import Protocol

from torch import fx

from zerofx.cost.compute import Roofline, num_flops, value_bytes
from zerofx.cost.fusion import values_inside_kernels
from zerofx.cost.lines import Line, deepen, line_through
from zerofx.cost.link import Link
from zerofx.cost.liveness import Curve, Held, Transport, held_after, live_bytes
from zerofx.ir.facts import facts
from zerofx.ir.ops import KEEP, REDUCE_START, UNSHARD_START
from zerofx.ir.program import Program
from zerofx.sim.timeline import simulate

Programs = tuple[Program, Program]
"""Forward and backward."""


class Machine(Protocol):
    """What is asked of a machine; see `zerofx.frontend.planner.Machine`."""

    @property
    def roofline(self) -> Roofline: ...
    @property
    def link(self) -> Link: ...
    @property
    def transport(self) -> Transport: ...


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds of a step.

    Attributes:
        compute: kernels of forward and backward.
        exposed: collectives that nothing hides.
        update: the optimizer's step.
    """

    compute: float
    exposed: float
    update: float = 0.0

    @property
    def step(self) -> float:
        """All of it."""
        return self.compute + self.exposed + self.update


@dataclasses.dataclass(frozen=True)
class View:
    """One stage of one model.

    Attributes:
        forward: memory of the forward program.
        backward: of the backward program.
        lasting: inputs and results of the model: bytes at batch size 0, and per sample.
        times: at the batch size that was asked for.
        sent_bytes: that a rank sends per step.
        across_bytes: those of them that leave its node.
    """

    forward: Line
    backward: Line
    lasting: tuple[float, float]
    times: Times
    sent_bytes: float
    across_bytes: float


def look(
    one: Programs, other: Programs, batch: int, wanted: int, machine: Machine, *, fused: bool
) -> View:
    """Look at one stage's programs of two batch sizes.

    Args:
        one: programs at the batch size `batch`.
        other: programs at `batch + 1`.
        batch: see there.
        wanted: the batch size whose time is asked for.
        machine: where they will run.
        fused: whether kernels are fused, as Inductor does.

    Raises:
        NotAlikeError: the programs depend on the batch size by more than their shapes.
    """
    (forward, backward, held), (forward2, backward2, held2) = (
        _curves(programs, machine.transport, fused) for programs in (one, other)
    )
    lasting, lasting2 = (sum(h.values[piece] for piece in h.lasting) for h in (held, held2))
    slope = lasting2 - lasting
    base, more = (_times(programs, machine, fused) for programs in (one, other))
    times = Times(
        base.compute + (wanted - batch) * (more.compute - base.compute),
        base.exposed + (wanted - batch) * (more.exposed - base.exposed),
    )
    return View(
        line_through(forward, batch, forward2, batch + 1),
        line_through(backward, batch, backward2, batch + 1),
        (lasting - batch * slope, slope),
        times,
        *sent_bytes(one),
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
        Times(
            grown(few.times.compute, more.times.compute),
            grown(few.times.exposed, more.times.exposed),
        ),
        grown(few.sent_bytes, more.sent_bytes),
        grown(few.across_bytes, more.across_bytes),
    )


def sent_bytes(programs: Programs) -> tuple[int, int]:
    """Bytes that a rank sends in a step, and those of them that leave its node.

    Gathers, and reductions; kept values are not sent again.
    A resident copy is gathered once a step, although forward and backward both ask for it.
    """
    forward, backward = programs
    kept = {facts(node).param for node in forward.calls(KEEP)}
    total = across = 0
    for program in programs:
        for start in program.calls(UNSHARD_START, REDUCE_START):
            specs = [
                program.params[name] for name in facts(start).members if name in program.params
            ]
            if start.target is UNSHARD_START and program is backward:
                resident = any(spec.layout.resident for spec in specs)
                if resident or (specs and all(spec.name in kept for spec in specs)):
                    continue
            total += facts(start).wire_bytes
            across += program.bytes_across_nodes(start)
    return total, across


def _curves(programs: Programs, transport: Transport, fused: bool) -> tuple[Curve, Curve, Held]:
    forward, backward = programs
    held = held_after(forward, transport, fused=fused)
    return (
        live_bytes(forward, transport, fused=fused),
        live_bytes(backward, transport, fused=fused, before=held),
        held,
    )


def _times(programs: Programs, machine: Machine, fused: bool) -> Times:
    kept = {facts(node).param for node in programs[0].calls(KEEP)}
    compute = exposed = 0.0
    for program in programs:
        again = kept if program is programs[1] else set[str]()

        def link(start: fx.Node, again: set[str] = again) -> float:
            members = facts(start).members
            here = start.target is UNSHARD_START and all(name in again for name in members)
            return 0.0 if here else machine.link.seconds(start)

        kernels = _Kernels(program, machine.roofline, fused)
        timeline = simulate(program, kernels.seconds, link)
        busy = sum(s.end - s.begin for s in timeline.spans if s.stream == "compute")
        compute += busy
        exposed += timeline.seconds - busy
    return Times(compute, exposed)


class _Kernels:
    """A roofline of fused kernels: what stays inside one is not written and read again."""

    def __init__(self, program: Program, roofline: Roofline, fused: bool) -> None:
        self._inside = values_inside_kernels(program.graph) if fused else set[fx.Node]()
        self._roofline = roofline

    def seconds(self, node: fx.Node) -> float:
        """Time of a node; inner values cost what they read from memory."""
        profile = self._roofline.profile
        if node.name in profile:
            return profile[node.name]
        read = [arg for arg in node.all_input_nodes if arg not in self._inside]
        moved = sum(value_bytes(arg.meta.get("val")) for arg in read)
        if node not in self._inside:
            moved += value_bytes(node.meta.get("val"))
        memory = moved / self._roofline.bytes_per_second
        return max(num_flops(node) / self._roofline.flops, memory)
