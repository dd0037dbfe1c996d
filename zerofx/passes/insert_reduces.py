"""Turn each gradient's mean over the ranks into start and wait of a reduction."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from torch import fx

from zerofx.ir.codes import all_reduced_numel
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import REDUCE_GRAD, REDUCE_START, REDUCE_WAIT, gradients
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """Markers and the bytes that each sends, in execution order."""

    reductions: tuple[tuple[fx.Node, int], ...]


@dataclasses.dataclass(frozen=True)
class InsertReduces(Pass):
    """`reduce_grad` becomes `reduce_start` and `reduce_wait`.

    ZeRO §5.2: with `place="ready"` (stages 2 and 3) a gradient is reduce-scattered as soon as it
    exists, and its full form dies there; with `place="end"` (stages 0 and 1) all reductions
    follow the last gradient. Replicated parameters are all-reduced.

    Before:
        g = mm(t(x), dy); s = reduce_grad(g, shard)
    After:
        g = mm(t(x), dy); p = reduce_start([g], [shard]); s = reduce_wait(p, shard)
    """

    place: Literal["ready", "end"] = "ready"

    name: ClassVar[str] = "insert_reduces"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.BACKWARD,))
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> ReducePlan:
        """Count the bytes."""
        return ReducePlan(
            tuple(
                (node, _wire_bytes(program.spec(node), node)) for node in program.calls(REDUCE_GRAD)
            )
        )

    def apply(self, edit: Editor, plan: ReducePlan) -> None:
        """Insert the nodes."""
        for node, wire_bytes in plan.reductions:
            grad, shard, layout = node.args
            known = facts(node)
            record = dataclasses.replace(
                known, role=Role.REDUCE, wire_bytes=wire_bytes, members=(known.param,)
            )
            anchor = node if self.place == "ready" else edit.program.output
            start = edit.call_before(anchor, REDUCE_START, ([grad], [shard], layout), record)
            grad_record = dataclasses.replace(known, role=Role.GRAD)
            reduced = edit.call_after(start, REDUCE_WAIT, (start, shard), grad_record)
            if self.place == "end":
                edit.move_readers_after(node, reduced)
            edit.replace(node, reduced)


def _wire_bytes(spec: ParamSpec | None, marker: fx.Node) -> int:
    if spec is None:
        return 0
    shards = spec.layout.num_shards
    scatter = spec.numel * (shards - 1) // shards
    dtype = spec.layout.reduce_dtype or gradients(marker)[0].meta["val"].dtype
    return (scatter + all_reduced_numel(spec)) * dtype.itemsize
