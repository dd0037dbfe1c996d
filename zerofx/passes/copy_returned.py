"""Return copies of weights, not the weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, facts
from zerofx.ir.ops import UNSHARD
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import alias_closure
from zerofx.passes.base import Pass

_CLONE = torch.ops.aten.clone.default


@dataclasses.dataclass(frozen=True)
class ReturnPlan:
    """Full values, and views of them, that the user gets back."""

    returned: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class CopyReturned(Pass):
    """A program that returns a weight, or a view of one, returns a copy.

    The memory of a full value is freed (stage 3), refreshed (stages 1 and 2) or is the parameter
    itself (replicated), so it must not leave the program.

    Before:
        w = unshard(shard); y = mm(x, w); return y, w
    After:
        w = unshard(shard); c = clone(w); y = mm(x, w); return y, c
    """

    name: ClassVar[str] = "copy_returned"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.INFERENCE))
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> ReturnPlan:
        """Find aliases of full values among the user's outputs."""
        user_outputs = program.outputs[: program.num_user_outputs]
        aliases = (a for full in program.calls(UNSHARD) for a in alias_closure(full))
        return ReturnPlan(tuple(node for node in aliases if node in user_outputs))

    def apply(self, edit: Editor, plan: ReturnPlan) -> None:
        """Copy each."""
        for node in plan.returned:
            copy = edit.call_after(node, _CLONE, (node,), Facts(param=facts(node).param))
            edit.set_input(edit.program.output, node, copy)
