"""Reduce neighbouring gradients together."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from zerofx.cost.tables import MOST_BUCKET_BYTES
from zerofx.ir.codes import note_sent
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import REDUCE_START, REDUCE_WAIT, gradients, members, waits_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import only_returned, positions
from zerofx.passes.base import Pass
from zerofx.passes.buckets import BucketPlan, bucket_facts, plan_buckets


@dataclasses.dataclass(frozen=True)
class FuseReduces(Pass):
    """Reductions of neighbouring gradients become one reduction of a bucket.

    ZeRO §5.2 buckets gradients by partition; here a bucket starts as soon as its last gradient
    exists. Gradients that the program itself goes on to compute with travel alone.

    Attributes:
        target_bytes: of full gradients in a bucket; see `zerofx.passes.buckets.plan_buckets`.
        most_bytes: bound of its default.

    Before:
        p = reduce_start([g], [s]); a = reduce_wait(p, s); h = mm(x, y)
        q = reduce_start([h], [t]); b = reduce_wait(q, t)
    After:
        h = mm(x, y); p = reduce_start([g, h], [s, t]); a = reduce_wait(p, s); b = reduce_wait(p, t)
    """

    target_bytes: int | None = None
    most_bytes: int = MOST_BUCKET_BYTES

    name: ClassVar[str] = "fuse_reduces"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.BACKWARD,))

    def plan(self, program: Program) -> BucketPlan:
        """Group the reductions, in the order in which their gradients are complete."""
        starts = [
            start
            for start in program.calls(REDUCE_START)
            if all(map(only_returned, waits_of(start)))
        ]
        return plan_buckets(program, starts, self.target_bytes, self.most_bytes)

    def apply(self, edit: Editor, plan: BucketPlan) -> None:
        """Insert one start for each bucket where its last gradient exists, then its waits."""
        place = positions(edit.program.graph)
        for bucket in plan.buckets:
            last = max(bucket.starts, key=lambda start: place[start])
            shards = [shard for start in bucket.starts for shard in members(start)]
            grads = [grad for start in bucket.starts for grad in gradients(start)]
            args = (grads, shards, *last.args[2:])
            anchor = fused = edit.call_before(
                last, REDUCE_START, args, bucket_facts(bucket, Role.REDUCE)
            )
            for start in bucket.starts:
                for wait in waits_of(start):
                    record = dataclasses.replace(facts(wait), bucket=bucket.name)
                    made = edit.call_after(anchor, REDUCE_WAIT, (fused, *wait.args[1:]), record)
                    anchor = edit.move_readers_after(wait, made)
                    edit.replace(wait, made)
                edit.erase(start)
            note_sent(edit, fused)
