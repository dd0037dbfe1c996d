"""Turn each read of a parameter into start and wait of a gather."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.codes import gathered_numel
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, Role, facts
from zerofx.ir.ops import UNSHARD, UNSHARD_START, UNSHARD_WAIT, full_dtype
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.ir.view import alias_closure, positions, readers
from zerofx.passes.base import RUNNING, Pass

_CAST = torch.ops.prims.convert_element_type.default


@dataclasses.dataclass(frozen=True)
class Gather:
    """One gather.

    Attributes:
        marker: what it replaces.
        first: the first node that computes with the value; the gather goes before it.
        views: views of the value that come earlier; they move along.
        wire_bytes: bytes that this rank sends.
    """

    marker: fx.Node
    first: fx.Node
    views: tuple[fx.Node, ...]
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class UnshardPlan:
    """Gathers, and markers of parameters that are whole on every rank."""

    gathers: tuple[Gather, ...]
    whole: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True)
class InsertUnshards(Pass):
    """`unshard` becomes `unshard_start` and `unshard_wait` right before the first reader.

    ZeRO §5.3 and §7.2.2: parameters are gathered when they are needed. For resident layouts
    (stages 1 and 2) the same nodes refresh the full copy in place, and only if an optimizer or the
    user changed the shard since. A replicated parameter is its own full value; with a dtype of its
    own that is a cast, in forward and again in backward. A shard's cast is part of its gather.

    Before:
        w = unshard(shard); y = mm(x, w)
    After:
        p = unshard_start([shard]); w = unshard_wait(p, shard); y = mm(x, w)
    """

    name: ClassVar[str] = "insert_unshards"
    regions: ClassVar[frozenset[Region]] = RUNNING
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> UnshardPlan:
        """Place every gather before its first reader that is no view."""
        place = positions(program.graph)
        gathers: list[Gather] = []
        whole: list[fx.Node] = []
        for node in program.calls(UNSHARD):
            spec = program.spec(node)
            if spec is not None and not spec.layout.sharded:
                whole.append(node)
            else:
                views = set(alias_closure(node)) - {node}
                computing = [user for user in readers(node) if user not in views]
                first = min(computing, key=lambda user: place[user], default=node)
                early = sorted(views, key=lambda view: place[view])
                moved = tuple(view for view in early if place[view] < place[first])
                gathers.append(Gather(node, first, moved, _wire_bytes(spec, node)))
        return UnshardPlan(tuple(gathers), tuple(whole))

    def apply(self, edit: Editor, plan: UnshardPlan) -> None:
        """Insert the nodes."""
        for node in plan.whole:
            edit.replace(node, _whole(edit, node))
        for gather in plan.gathers:
            shard, size, layout, *dtype = gather.marker.args
            known = facts(gather.marker)
            record = dataclasses.replace(
                known,
                role=Role.UNSHARD,
                axis="shard",
                wire_bytes=gather.wire_bytes,
                members=(known.param,),
            )
            start = edit.call_before(gather.first, UNSHARD_START, ([shard], layout), record)
            full = edit.call_after(start, UNSHARD_WAIT, (start, shard, size, *dtype), _full(record))
            edit.replace(gather.marker, full)
        for gather in plan.gathers:
            for view in gather.views:
                edit.move_before(view, gather.first)


def _whole(edit: Editor, marker: fx.Node) -> fx.Node:
    """The full value of a parameter that every rank holds: its shard, or a cast of it."""
    shard, dtype = marker.args[0], full_dtype(marker)
    assert isinstance(shard, fx.Node)
    if dtype in (None, shard.meta["val"].dtype):
        return shard
    record = dataclasses.replace(facts(marker), role=Role.COMPUTE)
    return edit.call_before(marker, _CAST, (shard, dtype), record)


def _full(record: Facts) -> Facts:
    return dataclasses.replace(record, role=Role.FULL, wire_bytes=0, members=())


def _wire_bytes(spec: ParamSpec | None, marker: fx.Node) -> int:
    return 0 if spec is None else gathered_numel(spec) * marker.meta["val"].dtype.itemsize
