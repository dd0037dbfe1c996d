"""What to say of each step of a program if it fails."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from zerofx.frontend.segments import Segment
from zerofx.ir.facts import facts
from zerofx.ir.ops import UNSHARD_START, collective_of, is_call
from zerofx.ir.program import Program
from zerofx.ir.text import node_names
from zerofx.runtime.place import Place


class Places:
    """Names the pieces of a program for errors.

    Args:
        program: verified.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._names = node_names(program)
        self._handle = next((s.layout.handle for s in program.params.values()), None)

    def __call__(self, piece: fx.Node | Segment, number: int) -> Place | None:
        """The place of a piece; `None` for what neither computes nor moves parameters."""
        if self._handle is None:
            return None
        if isinstance(piece, Segment):
            return self._of_segment(piece, self._handle, number)
        start = collective_of(piece)
        if start is None:
            return None
        kind = "gather" if is_call(start, UNSHARD_START) else "reduction"
        size = self._program.full_bytes(start)
        return Place(kind, self._names[start], facts(start).members, size, self._handle, number)

    def _of_segment(self, segment: Segment, handle: int, number: int) -> Place:
        read = _distinct(facts(node).param for node in segment.inputs)
        inside = _distinct(facts(node).module for node in segment.outputs)
        name = "in " + (" and ".join(inside[:2]) or "the model itself")
        return Place("computation", name, read, 0, handle, number)


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for name in names if name))
