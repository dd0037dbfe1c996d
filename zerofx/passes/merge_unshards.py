"""Read a parameter's full value once, however often the model reads it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.ops import UNSHARD, full_dtype
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class MergePlan:
    """Which marker stands for which others: first read to later reads, in order."""

    merged: tuple[tuple[fx.Node, tuple[fx.Node, ...]], ...]


@dataclasses.dataclass(frozen=True)
class MergeUnshards(Pass):
    """Several `unshard`s of one shard become the first of them.

    Tied weights and modules that are called twice read their parameter again; one gather serves
    all reads of a program (ZeRO §5.3 counts one per pass).

    Before:
        a = unshard(shard); y = mm(x, a); b = unshard(shard); z = mm(y, b)
    After:
        a = unshard(shard); y = mm(x, a); z = mm(y, a)
    """

    name: ClassVar[str] = "merge_unshards"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.JOINT, Region.INFERENCE))
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> MergePlan:
        """Group markers by shard, layout and dtype."""
        groups: dict[tuple[object, ...], list[fx.Node]] = {}
        for node in program.calls(UNSHARD):
            groups.setdefault((node.args[0], node.args[2], full_dtype(node)), []).append(node)
        return MergePlan(
            tuple((group[0], tuple(group[1:])) for group in groups.values() if len(group) > 1)
        )

    def apply(self, edit: Editor, plan: MergePlan) -> None:
        """Redirect later reads to the first."""
        for first, others in plan.merged:
            for other in others:
                edit.replace(other, first)
