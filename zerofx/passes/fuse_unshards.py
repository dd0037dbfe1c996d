"""Gather neighbouring parameters together."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.cost.tables import MOST_BUCKET_BYTES
from zerofx.ir.codes import note_sent
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import UNSHARD_START, UNSHARD_WAIT, members, waits_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import positions
from zerofx.passes.base import RUNNING, Pass
from zerofx.passes.buckets import BucketPlan, bucket_facts, plan_buckets


@dataclasses.dataclass(frozen=True)
class FuseUnshards(Pass):
    """Gathers of neighbouring parameters become one gather of a bucket.

    A collective costs its latency however small it is. The bucket starts where its first member
    did, and its members are waited for together; each keeps its own memory and its own free.

    Attributes:
        target_bytes: of full values in a bucket; see `zerofx.passes.buckets.plan_buckets`.
        most_bytes: bound of its default.

    Before:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); free(w)
        q = unshard_start([t]); v = unshard_wait(q, t); z = mm(y, v); free(v)
    After:
        p = unshard_start([s, t]); w = unshard_wait(p, s); v = unshard_wait(p, t)
        y = mm(x, w); free(w); z = mm(y, v); free(v)
    """

    target_bytes: int | None = None
    most_bytes: int = MOST_BUCKET_BYTES

    name: ClassVar[str] = "fuse_unshards"
    regions: ClassVar[frozenset[Region]] = RUNNING

    def plan(self, program: Program) -> BucketPlan:
        """Group the gathers, in order of first use."""
        return plan_buckets(
            program, program.calls(UNSHARD_START), self.target_bytes, self.most_bytes
        )

    def apply(self, edit: Editor, plan: BucketPlan) -> None:
        """Insert one start for each bucket, and its waits right after it."""
        place = positions(edit.program.graph)
        for bucket in plan.buckets:
            first = min(bucket.starts, key=lambda start: place[start])
            shards = [shard for start in bucket.starts for shard in members(start)]
            record = bucket_facts(bucket, Role.UNSHARD)
            fused = edit.call_before(first, UNSHARD_START, (shards, *first.args[1:]), record)
            anchor = fused
            for start in bucket.starts:
                for wait in waits_of(start):
                    anchor = _waited(edit, wait, fused, anchor, bucket.name)
                edit.erase(start)
            note_sent(edit, fused)


def _waited(edit: Editor, wait: fx.Node, fused: fx.Node, anchor: fx.Node, name: str) -> fx.Node:
    """A wait for the same member of the bucket, after `anchor`, in place of `wait`."""
    record = dataclasses.replace(facts(wait), bucket=name)
    made = edit.call_after(anchor, UNSHARD_WAIT, (fused, *wait.args[1:]), record)
    edit.replace(wait, made)
    return made
