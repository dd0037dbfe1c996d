"""Hand out copies of weights, not the weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, facts
from zerofx.ir.ops import REDUCE_GRAD, UNSHARD, is_call
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import alias_closure
from zerofx.passes.base import RUNNING, Pass

_CLONE = torch.ops.aten.clone.default


@dataclasses.dataclass(frozen=True)
class ReturnPlan:
    """Full values, and views of them, and who hands each of them out."""

    returned: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...]


@dataclasses.dataclass(frozen=True)
class CopyReturned(Pass):
    """A program that returns a weight, or a view of one, returns a copy.

    The memory of a full value is freed (stage 3), refreshed (stages 1 and 2) or is the parameter
    itself (replicated), so it must not leave the program: neither as what the user gets, nor as
    the gradient of an input, nor as a gradient that a reduction is going to read.

    Before:
        w = unshard(shard); y = mm(x, w); return y, w
    After:
        w = unshard(shard); c = clone(w); y = mm(x, w); return y, c
    """

    name: ClassVar[str] = "copy_returned"
    regions: ClassVar[frozenset[Region]] = RUNNING
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> ReturnPlan:
        """Find aliases of full values among what is returned and what is reduced."""
        returned = {node for node in program.returned if isinstance(node, fx.Node)}
        aliases = [a for full in program.calls(UNSHARD) for a in alias_closure(full)]
        found: list[tuple[fx.Node, tuple[fx.Node, ...]]] = []
        for node in aliases:
            takers = [user for user in node.users if is_call(user, REDUCE_GRAD)]
            if node in returned:
                takers.append(program.output)
            if takers:
                found.append((node, tuple(takers)))
        return ReturnPlan(tuple(found))

    def apply(self, edit: Editor, plan: ReturnPlan) -> None:
        """Copy each."""
        for node, takers in plan.returned:
            copy = edit.call_after(node, _CLONE, (node,), Facts(param=facts(node).param))
            for taker in takers:
                edit.set_input(taker, node, copy)
