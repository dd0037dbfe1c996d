"""Turn each gradient's mean over the ranks into start and wait of a reduction."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import fx

from zerofx.ir.codes import all_reduced_numel, scattered_numel
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import REDUCE_GRAD, REDUCE_START, REDUCE_WAIT, gradients
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.ir.view import only_returned
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class ReducePlan:
    """Markers, the bytes that each sends, and the dtype to state, in execution order."""

    reductions: tuple[tuple[fx.Node, int, torch.dtype | None], ...]


@dataclasses.dataclass(frozen=True)
class InsertReduces(Pass):
    """`reduce_grad` becomes `reduce_start` and `reduce_wait`.

    ZeRO §5.2: with `place="ready"` (stages 2 and 3) a gradient is reduce-scattered as soon as it
    exists, and its full form dies there; with `place="end"` (stages 0 and 1) all reductions
    follow the last gradient. Replicated parameters are all-reduced. Where gradients are to be held
    in another dtype than their parameters, those that the program only returns end in it.

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
        found = ((node, program.spec(node)) for node in program.calls(REDUCE_GRAD))
        return ReducePlan(
            tuple((node, _wire_bytes(spec, node), _dtype(spec, node)) for node, spec in found)
        )

    def apply(self, edit: Editor, plan: ReducePlan) -> None:
        """Insert the nodes."""
        for node, wire_bytes, dtype in plan.reductions:
            grad, shard, layout = node.args
            known, spec = facts(node), edit.program.spec(node)
            record = dataclasses.replace(
                known,
                role=Role.REDUCE,
                axis=spec.layout.reduced_over if spec is not None else "",
                wire_bytes=wire_bytes,
                members=(known.param,),
            )
            anchor = node if self.place == "ready" else edit.program.output
            start = edit.call_before(anchor, REDUCE_START, ([grad], [shard], layout), record)
            grad_record = dataclasses.replace(known, role=Role.GRAD)
            stated = () if dtype is None else (dtype,)
            reduced = edit.call_after(start, REDUCE_WAIT, (start, shard, *stated), grad_record)
            if dtype is not None:
                _return(edit, node, reduced)
            if self.place == "end":
                edit.move_readers_after(node, reduced)
            edit.replace(node, reduced)


def _dtype(spec: ParamSpec | None, marker: fx.Node) -> torch.dtype | None:
    """The dtype of the gradient at rest, if it is another one and nothing computes with it."""
    dtype = spec.layout.grad_dtype if spec is not None else None
    other = dtype is not marker.meta["val"].dtype
    return dtype if other and only_returned(marker) else None


def _return(edit: Editor, marker: fx.Node, reduced: fx.Node) -> None:
    """Return `reduced` instead of what repeats `marker`, which has the shard's dtype."""
    output, found = edit.program.output, [marker]
    for node in found:
        found.extend(user for user in node.users if user is not output)
        if output in node.users:
            edit.set_input(output, node, reduced)
    for node in reversed(found[1:]):
        edit.erase(node)


def _wire_bytes(spec: ParamSpec | None, marker: fx.Node) -> int:
    if spec is None:
        return 0
    dtype = spec.layout.reduce_dtype or gradients(marker)[0].meta["val"].dtype
    return (scattered_numel(spec) + all_reduced_numel(spec)) * dtype.itemsize
