"""Sum a parameter's gradients on this rank before they are exchanged."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, Role, facts
from zerofx.ir.ops import REDUCE_GRAD, is_call
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import identity_source
from zerofx.passes.base import Numerics, Pass

_ADD = torch.ops.aten.add.Tensor


@dataclasses.dataclass(frozen=True)
class SumPlan:
    """Additions of two reductions of the same shard, in execution order."""

    sums: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class MergeReduces(Pass):
    """The sum of two reductions becomes the reduction of the sum.

    A parameter that is read twice (tied, or its module called twice) has two gradients. Adding
    first halves the bytes and is what autograd does without sharding: the order of additions stays.

    Before:
        a = reduce_grad(g, shard); b = reduce_grad(h, shard); s = add(a, b)
    After:
        t = add(g, h); s = reduce_grad(t, shard)
    """

    name: ClassVar[str] = "merge_reduces"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.JOINT,))
    numerics: ClassVar[Numerics] = "reordered"
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> SumPlan:
        """Find the additions; an addition of merged additions counts too."""
        of_shard: dict[fx.Node, object] = {n: n.args[1] for n in program.calls(REDUCE_GRAD)}
        sums: list[fx.Node] = []
        for node in program.calls(_ADD):
            sources = [identity_source(arg) for arg in node.all_input_nodes]
            shards = {of_shard.get(source) for source in sources}
            if len(sources) == 2 and len(shards) == 1 and None not in shards and not node.kwargs:
                of_shard[node] = shards.pop()
                sums.append(node)
        return SumPlan(tuple(sums))

    def apply(self, edit: Editor, plan: SumPlan) -> None:
        """Exchange the order of addition and reduction, innermost first."""
        for node in plan.sums:
            left, right = (identity_source(arg) for arg in node.all_input_nodes)
            assert is_call(left, REDUCE_GRAD) and is_call(right, REDUCE_GRAD)
            operands = (left.args[0], right.args[0])
            total = edit.call_before(node, _ADD, operands, Facts(Role.COMPUTE, facts(left).param))
            args = (total, *left.args[1:])
            edit.replace(node, edit.call_after(total, REDUCE_GRAD, args, facts(left)))
            for old in (left, right):
                _erase_unread(edit, old)


def _erase_unread(edit: Editor, node: fx.Node) -> None:
    """Erase `node` if nothing but views that nobody reads depends on it."""
    for user in list(node.users):
        if identity_source(user) is not user:
            _erase_unread(edit, user)
    if not node.users:
        edit.erase(node)
