"""Give every rank rank 0's buffers before a forward."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts, Role, facts
from zerofx.ir.ops import SYNC_BUFFERS
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class SyncPlan:
    """Buffers that the program reads or updates, by model, and the first node after the inputs."""

    buffers: dict[int, list[fx.Node]]
    first: fx.Node


@dataclasses.dataclass(frozen=True)
class SyncBuffers(Pass):
    """`sync_buffers` starts every program that reads buffers, one for each model.

    DistributedDataParallel's `broadcast_buffers`: batch statistics follow rank 0's data. At run
    time values are sent by the first program of a forward, if any rank changed them since the last
    time.

    Before:
        mean = running_mean; y = batch_norm(x, mean)
    After:
        sync_buffers([running_mean]); mean = running_mean; y = batch_norm(x, mean)
    """

    name: ClassVar[str] = "sync_buffers"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.INFERENCE))
    mandatory: ClassVar[bool] = True

    def plan(self, program: Program) -> SyncPlan:
        """Collect the buffers."""
        buffers: dict[int, list[fx.Node]] = {}
        for node in program.with_role(Role.BUFFER):
            buffers.setdefault(program.buffers[facts(node).param], []).append(node)
        first = next(node for node in program.graph.nodes if node.op != "placeholder")
        return SyncPlan(buffers, first)

    def apply(self, edit: Editor, plan: SyncPlan) -> None:
        """Insert one node for all of a model's."""
        for layout, buffers in plan.buffers.items():
            args = (buffers, layout)
            edit.call_before(plan.first, SYNC_BUFFERS, args, Facts(Role.SYNC, axis="shard"))
