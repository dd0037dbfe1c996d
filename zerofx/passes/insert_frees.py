"""Free each gathered value after its last reader."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import FREE, REDUCE_START, UNSHARD_START, UNSHARD_WAIT, is_call
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import positions, readers
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class FreePlan:
    """Full values, each with the node before which it is freed and the handle of its layout."""

    frees: tuple[tuple[fx.Node, fx.Node, int], ...]


@dataclasses.dataclass(frozen=True)
class InsertFrees(Pass):
    """`free` follows the last reader of a gathered value, through views too.

    ZeRO §5.3: parameters are discarded after use. Resident values (stages 1 and 2) are not freed.
    A program is cut into compute segments at its communication nodes; a small value lives on to the
    next one, so that its free does not cut once more. No gather starts meanwhile.

    Attributes:
        linger_bytes: size up to which a value waits for the next communication node.

    Before:
        w = unshard_wait(p); y = mm(x, t(w)); z = relu(y); v = unshard_start(s)
    After:
        w = unshard_wait(p); y = mm(x, t(w)); z = relu(y); free(w); v = unshard_start(s)
    """

    linger_bytes: int = 8 << 20

    name: ClassVar[str] = "insert_frees"
    regions: ClassVar[frozenset[Region]] = frozenset(
        (Region.FORWARD, Region.BACKWARD, Region.INFERENCE)
    )
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> FreePlan:
        """Find last readers, and the node before which each free goes."""
        place = positions(program.graph)
        following = _next_cuts(program)
        frees: list[tuple[fx.Node, fx.Node, int]] = []
        for full in program.calls(UNSHARD_WAIT):
            spec, start = program.spec(full), full.args[0]
            assert isinstance(start, fx.Node)
            if spec is not None and (spec.layout.resident or not spec.layout.sharded):
                continue
            reading = [node for node in readers(full) if node.op != "output"]
            last = max(reading, key=lambda node: place[node], default=full)
            small = spec is not None and spec.numel * spec.dtype.itemsize <= self.linger_bytes
            layout = start.args[2]
            assert isinstance(layout, int)
            frees.append((full, following[last] if small else last.next, layout))
        return FreePlan(tuple(frees))

    def apply(self, edit: Editor, plan: FreePlan) -> None:
        """Insert the frees."""
        for full, before, layout in plan.frees:
            record = dataclasses.replace(facts(full), role=Role.FREE)
            edit.call_before(before, FREE, (full, layout), record)


def _next_cuts(program: Program) -> dict[fx.Node, fx.Node]:
    """For each node, the next one after it that starts a collective or returns."""
    found: dict[fx.Node, fx.Node] = {}
    cut = program.output
    for node in reversed(program.graph.nodes):
        found[node] = cut
        if is_call(node, UNSHARD_START, REDUCE_START):
            cut = node
    return found
