"""Turn each read of a parameter into start and wait of a gather."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, Role, facts
from zerofx.ir.ops import UNSHARD, UNSHARD_START, UNSHARD_WAIT
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.ir.view import positions
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class UnshardPlan:
    """Markers, the first reader before which each gather goes, and what it sends."""

    gathers: tuple[tuple[fx.Node, fx.Node, int], ...]
    whole: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class InsertUnshards(Pass):
    """`unshard` becomes `unshard_start` and `unshard_wait` right before the first reader.

    ZeRO §5.3 and §7.2.2: parameters are gathered when they are needed. For resident layouts
    (stages 1 and 2) the same nodes refresh the full copy in place, and only if an optimizer or the
    user changed the shard since; a replicated parameter is its own full value.

    Before:
        w = unshard(shard); y = mm(x, w)
    After:
        p = unshard_start(shard); w = unshard_wait(p); y = mm(x, w)
    """

    name: ClassVar[str] = "insert_unshards"
    regions: ClassVar[frozenset[Region]] = frozenset(
        (Region.FORWARD, Region.BACKWARD, Region.INFERENCE)
    )
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> UnshardPlan:
        """Place every gather before its first reader."""
        place = positions(program.graph)
        gathers: list[tuple[fx.Node, fx.Node, int]] = []
        whole: list[fx.Node] = []
        for node in program.calls(UNSHARD):
            spec = program.spec(node)
            if spec is not None and not spec.layout.sharded:
                whole.append(node)
            else:
                first = min(node.users, key=lambda user: place[user], default=node)
                gathers.append((node, first, _wire_bytes(spec)))
        return UnshardPlan(tuple(gathers), tuple(whole))

    def apply(self, edit: Editor, plan: UnshardPlan) -> None:
        """Insert the nodes."""
        for node in plan.whole:
            shard = node.args[0]
            assert isinstance(shard, fx.Node)
            edit.replace(node, shard)
        for node, first, wire_bytes in plan.gathers:
            shard, size, layout = node.args
            record = dataclasses.replace(
                facts(node), role=Role.UNSHARD, axis="shard", wire_bytes=wire_bytes
            )
            start = edit.call_before(first, UNSHARD_START, (shard, size, layout), record)
            full = edit.call_after(start, UNSHARD_WAIT, (start, size), _full(record))
            edit.replace(node, full)


def _full(record: Facts) -> Facts:
    return dataclasses.replace(record, role=Role.FULL, wire_bytes=0)


def _wire_bytes(spec: ParamSpec | None) -> int:
    if spec is None:
        return 0
    shards = spec.layout.num_shards
    return spec.padded_numel // shards * (shards - 1) * spec.dtype.itemsize
