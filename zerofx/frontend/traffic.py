"""What a rank sends in a step, by kind: of plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import fx

from zerofx.cost.machine import already_whole, bytes_sent, left_to
from zerofx.ir.codes import wire_dtype
from zerofx.ir.facts import facts
from zerofx.ir.ops import REDUCE_START, STARTS, is_call
from zerofx.ir.program import Program

NOTHING_SENT = (0.0, 0.0, 0.0)
"""Of one kind."""


Traffic = Mapping[tuple[str, str, str], tuple[float, float, float]]
"""By region, `gather` or `reduce`, and what is on the wire: bytes that a rank sends in a step; of
these, the scales of codes; and those that leave its node."""


def total_of(traffic: Traffic) -> tuple[int, int]:
    """All bytes, and those of them that leave the rank's node."""
    sent = traffic.values()
    return round(sum(total for total, _, _ in sent)), round(sum(across for _, _, across in sent))


def traffic(programs: tuple[Program, Program]) -> Traffic:
    """What a rank sends in a step.

    Gathers, and reductions; kept values are not sent again.
    A resident copy is gathered once a step, although forward and backward both ask for it.
    """
    found: dict[tuple[str, str, str], tuple[float, float, float]] = {}
    for program, start, sent in _sending(programs):
        kind = "reduce" if is_call(start, REDUCE_START) else "gather"
        key = (program.region.value, kind, wire_dtype(program, start))
        record = facts(start)
        scales = record.scale_bytes * sent // record.wire_bytes
        sizes = (sent, scales, program.bytes_across_nodes(start, sent))
        before = found.get(key, NOTHING_SENT)
        found[key] = (before[0] + sizes[0], before[1] + sizes[1], before[2] + sizes[2])
    return found


def _sending(programs: tuple[Program, Program]) -> Iterator[tuple[Program, fx.Node, int]]:
    """The collectives of a step that send something, where they are, and bytes that a rank sends.

    Of an average step: the copies of frozen parameters that stages 1 and 2 gather at most once do
    not count.
    """
    for program, kept in zip(programs, left_to(programs), strict=True):
        whole = already_whole(program, kept)
        for start in program.calls(*STARTS):
            if sent := bytes_sent(program, start, whole):
                yield program, start, sent
