"""Timeline: when a program computes and communicates, and what is exposed.

Three streams: kernels run one after another, collectives one after another, and only a wait makes
the first stop for the second; Python launches both. No rank is ahead of the cores that ranks share:
what all of them do until a node takes its time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

from torch import fx

from zerofx.cost.host import NO_HOST, Host
from zerofx.cost.machine import bytes_sent
from zerofx.cost.processor import Cores
from zerofx.ir.ops import PROGRAM_OPS, computes, is_start, is_wait, started_by
from zerofx.ir.program import Program
from zerofx.ir.view import aliased_inputs

Seconds = Callable[[fx.Node], float]
"""How long a node takes on its own stream."""


@dataclasses.dataclass(frozen=True)
class Span:
    """One node on one stream, in seconds from the program's begin.

    Attributes:
        node: what ran.
        stream: `compute`, `link`, or why compute stands still: `stall`, at a wait; `slow`, what a
            kernel loses to collectives under way; `host`, for Python, or a core.
        begin: when it began.
        end: when it ended.
    """

    node: fx.Node
    stream: str
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """A simulated run.

    Attributes:
        spans: kernels, collectives and stalls, in order of issue.
        issued: when each node's turn came.
        exposed: for each wait at which compute stops, how long.
        seconds: when computation and link are done.
    """

    spans: tuple[Span, ...]
    issued: Mapping[fx.Node, float]
    exposed: tuple[tuple[fx.Node, float], ...]
    seconds: float

    @property
    def compute_seconds(self) -> float:
        """Time of all kernels."""
        return sum(span.end - span.begin for span in self.spans if span.stream == "compute")

    @property
    def host_seconds(self) -> float:
        """Time in which kernels wait for Python, or for cores that other ranks use."""
        return sum(span.end - span.begin for span in self.spans if span.stream == "host")

    def exposure(self) -> list[tuple[Span, float]]:
        """Each collective, and how long of it nothing was computed; the rest is hidden."""
        kernels = [
            span for span in self.spans if span.stream == "compute" and span.end > span.begin
        ]
        out: list[tuple[Span, float]] = []
        first = 0
        for span in (each for each in self.spans if each.stream == "link"):
            # Both streams run in order: what ended before this collective began is over for good.
            while first < len(kernels) and kernels[first].end <= span.begin:
                first += 1
            hidden = 0.0
            for kernel in itertools.islice(kernels, first, None):
                if kernel.begin >= span.end:
                    break
                hidden += min(kernel.end, span.end) - max(kernel.begin, span.begin)
            out.append((span, max(0.0, span.end - span.begin - hidden)))
        return out

    @property
    def busy_seconds(self) -> float:
        """Time of all collectives, hidden or not."""
        return sum(span.end - span.begin for span in self.spans if span.stream == "link")


def simulate(
    program: Program,
    compute: Seconds,
    link: Seconds,
    codes: Seconds = lambda node: 0.0,
    host: Host = NO_HOST,
    whole: frozenset[str] = frozenset(),
) -> Timeline:
    """Run `program` in simulated time.

    Args:
        program: with communication nodes, in execution order.
        compute: seconds of a node that computes.
        link: seconds of `unshard_start` or `reduce_start` once the link is free; a collective that
            takes none costs no Python either.
        codes: seconds of kernels that make codes before a collective starts, or that read them once
            it was waited for.
        host: what launches all of them, and the cores that ranks share.
        whole: parameters whose full values are there: see `already_whole`.
    """
    now = link_free = 0.0
    launched, cores = host.program, Cores(host.processor)
    done: dict[fx.Node, float] = {}
    spans: list[Span] = []
    issued: dict[fx.Node, float] = {}
    exposed: list[tuple[fx.Node, float]] = []
    for node in program.graph.nodes:
        took = _seconds(node, compute, link)
        launched = max(launched + _python(node, took, host), cores.busy_until)
        if launched > now:
            spans.append(Span(node, "host", now, launched))
            now = launched
        issued[node] = now
        coding = 0.0 if computes(node) else codes(node)
        if is_wait(node):
            late = done[started_by(node)] - now
            if late > 0:
                exposed.append((node, late))
                spans.append(Span(node, "stall", now, now + late))
                now += late
        if coding:
            spans.append(Span(node, "compute", now, now + coding))
            now += coding
        if is_start(node):
            begin = max(now, link_free) if took else now  # what is there waits for no link
            done[node] = begin + took
            link_free = max(link_free, done[node])
            spans.append(Span(node, "link", begin, done[node]))
        elif computes(node):
            lost = _lost(took, link_free - now, host.contention)
            if lost:
                spans.append(Span(node, "slow", now, now + lost))
            spans.append(Span(node, "compute", now + lost, now + lost + took))
            now += lost + took
        cores.take(node, took, coding, bytes_sent(program, node, whole) if is_start(node) else 0)
        if not host.runs_ahead:
            launched = now
    seconds = max(now, link_free)
    return Timeline(tuple(spans), issued, tuple(exposed), seconds)


def _seconds(node: fx.Node, compute: Seconds, link: Seconds) -> float:
    """Of a node on its own stream."""
    if is_start(node):
        return link(node)
    return compute(node) if computes(node) and not aliased_inputs(node) else 0.0


def _python(node: fx.Node, took: float, host: Host) -> float:
    """Of a node on the host; `took` is its time elsewhere."""
    starts = is_start(node)
    if node.target in PROGRAM_OPS:
        return 0.0 if starts and not took else host.seconds(node)
    return host.kernel if took else 0.0


def _lost(took: float, busy: float, contention: float) -> float:
    """How much later a kernel ends since the link is busy for another `busy` seconds."""
    if busy <= 0 or not took:
        return 0.0
    if took < busy * (1 - contention):
        return took / (1 - contention) - took
    return busy * contention
