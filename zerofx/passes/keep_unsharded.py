"""Keep gathered values from forward to backward where memory allows."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import facts
from zerofx.ir.ops import FREE, KEEP, UNSHARD_START, members, waits_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class KeepPlan:
    """What backward finds gathered.

    Attributes:
        kept: frees that become keeps, each with the shard of its parameter.
        full_bytes: memory held from forward to backward.
        reasons: for each bucket, by the names of its parameters, why it is kept or freed.
    """

    kept: tuple[tuple[fx.Node, fx.Node], ...]
    full_bytes: int
    reasons: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True)
class KeepUnsharded(Pass):
    """The last bucket of forward is the first of backward: it is kept, not freed and gathered anew.

    That costs no memory at the peak, which lies in backward. Within `budget_bytes` more buckets are
    kept, smallest first: a gather's latency makes them save most time per byte (ZeRO-3 sends 3Ψ,
    §7.2.2; with everything kept 2Ψ). At run time a kept value serves the next backward only, and
    only if nobody changed the parameter meanwhile; a later graph of the same forward may take its
    place (`zerofx.runtime.kept`).

    Attributes:
        budget_bytes: of kept values beyond the last bucket; 0 keeps nothing at all; by default the
            last bucket alone is kept.

    Before:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); free(w)
    After:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); keep(w, s)
    """

    budget_bytes: int | None = None

    name: ClassVar[str] = "keep_unsharded"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD,))

    def plan(self, program: Program) -> KeepPlan:
        """Choose buckets, the last one first."""
        chosen: list[tuple[fx.Node, fx.Node]] = []
        reasons: list[tuple[str, str]] = []
        left = self.budget_bytes or 0
        total = 0
        buckets = [b for start in program.calls(UNSHARD_START) if (b := _frees_of(program, start))]
        last = buckets[-1] if buckets else {}
        for bucket in sorted(buckets, key=lambda b: (b is not last, _bytes(program, b))):
            size = _bytes(program, bucket)
            spent = 0 if bucket is last else size
            names = ", ".join(facts(free).param for free in bucket)
            if self.budget_bytes == 0:
                reasons.append((names, "freed: the budget is 0"))
            elif spent > left:
                reasons.append((names, f"freed: {size} B, and {left} B of the budget are left"))
            else:
                why = "forward's last bucket" if bucket is last else f"{size} B within the budget"
                reasons.append((names, f"kept: {why}"))
                left -= spent
                total += size
                chosen += bucket.items()
        return KeepPlan(tuple(chosen), total, tuple(reasons))

    def apply(self, edit: Editor, plan: KeepPlan) -> None:
        """Replace the frees."""
        for free, shard in plan.kept:
            full, layout = free.args
            edit.call_before(free, KEEP, (full, shard, layout), facts(free))
            edit.erase(free)


def _frees_of(program: Program, start: fx.Node) -> dict[fx.Node, fx.Node]:
    """The frees of a bucket's members that backward gathers again, each with its shard."""
    return {
        free: shard
        for wait, shard in zip(waits_of(start), members(start), strict=True)
        if facts(wait).param in program.read_later
        for free in wait.users
        if free.target is FREE
    }


def _bytes(program: Program, frees: dict[fx.Node, fx.Node]) -> int:
    return program.full_bytes(*frees)
