"""Free each gathered value after its last reader."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import FREE, UNSHARD_WAIT, started_by
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import positions, readers
from zerofx.passes.base import RUNNING, Pass


@dataclasses.dataclass(frozen=True)
class FreePlan:
    """Full values, each with the node before which it is freed and the handle of its layout."""

    frees: tuple[tuple[fx.Node, fx.Node, int], ...]


@dataclasses.dataclass(frozen=True)
class InsertFrees(Pass):
    """`free` follows the last reader of a gathered value, through views too.

    ZeRO §5.3: parameters are discarded after use. Resident values (stages 1 and 2) are not freed.

    Before:
        w = unshard_wait(p); y = mm(x, t(w)); z = relu(y)
    After:
        w = unshard_wait(p); y = mm(x, t(w)); free(w); z = relu(y)
    """

    name: ClassVar[str] = "insert_frees"
    regions: ClassVar[frozenset[Region]] = RUNNING
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> FreePlan:
        """Find last readers, and the node before which each free goes."""
        place = positions(program.graph)
        frees: list[tuple[fx.Node, fx.Node, int]] = []
        for full in program.calls(UNSHARD_WAIT):
            spec = program.spec(full)
            if spec is not None and not spec.layout.temporary:
                continue
            reading = [node for node in readers(full) if node.op != "output"]
            last = max(reading, key=lambda node: place[node], default=full)
            layout = started_by(full).args[1]
            assert isinstance(layout, int)
            frees.append((full, last.next, layout))
        return FreePlan(tuple(frees))

    def apply(self, edit: Editor, plan: FreePlan) -> None:
        """Insert the frees."""
        for full, before, layout in plan.frees:
            record = dataclasses.replace(facts(full), role=Role.FREE)
            edit.call_before(before, FREE, (full, layout), record)
