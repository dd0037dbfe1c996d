"""Gather inside the node what this node has gathered before (hpZ)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import NODE, Role, facts
from zerofx.ir.ops import FREE, KEEP, KEEP_SHARD, UNSHARD_START, waits_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class SecondaryPlan:
    """What a program leaves behind, and what it finds.

    Attributes:
        kept: ends of gathered values (`free` or `keep`) before which a secondary shard is kept.
        shard_bytes: of all secondary shards that this program keeps, on each rank.
        inside: gathers that stay inside the node, each with the bytes that this rank sends.
    """

    kept: tuple[fx.Node, ...]
    shard_bytes: int
    inside: tuple[tuple[fx.Node, int], ...]


@dataclasses.dataclass(frozen=True)
class AddSecondaryShards(Pass):
    """Forward keeps a second shard of each full value, and backward gathers from those.

    ZeRO++ §3.2 (hpZ): the ranks of a node hold a whole copy together, in the dtype of computation,
    so that backward's gathers, which bear `axis=node`, send nothing across nodes. A copy serves as
    long as nobody changed its parameter; otherwise the same gather goes over all ranks, so that
    values never differ from those without this pass. Forward gathers over all ranks, but for the
    later micro-batches of an accumulation. Inference programs are left alone, and so are replicated
    parameters.

    Before:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); free(w)
    After:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); keep_shard(w, s); free(w)
    """

    name: ClassVar[str] = "add_secondary_shards"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.BACKWARD))

    def plan(self, program: Program) -> SecondaryPlan:
        """Find the parameters that have secondary shards."""
        if program.region is Region.FORWARD:
            kept = tuple(end for end in program.calls(FREE, KEEP) if _has_secondary(program, end))
            return SecondaryPlan(kept, sum(_shard_bytes(program, end) for end in kept), ())
        starts = [
            start
            for start in program.calls(UNSHARD_START)
            if all(_has_secondary(program, wait) for wait in waits_of(start))
        ]
        inside = tuple((start, _sent_bytes(program, start)) for start in starts)
        return SecondaryPlan((), 0, inside)

    def apply(self, edit: Editor, plan: SecondaryPlan) -> None:
        """Insert nodes in forward, and say in backward where gathers go."""
        for end in plan.kept:
            full = end.all_input_nodes[0]
            shard, layout = full.args[1], end.args[-1]
            record = dataclasses.replace(facts(end), role=Role.FREE)
            edit.call_before(end, KEEP_SHARD, (full, shard, layout), record)
        for start, sent in plan.inside:
            edit.note(start, axis=NODE, wire_bytes=sent)


def _has_secondary(program: Program, node: fx.Node) -> bool:
    spec = program.spec(node)
    return spec is not None and spec.layout.secondary


def _shard_bytes(program: Program, node: fx.Node) -> int:
    """Of the secondary shard of a full value, or of what ends one."""
    spec = program.spec(node)
    full = node if node.target not in (FREE, KEEP) else node.all_input_nodes[0]
    assert spec is not None
    return spec.secondary_numel * full.meta["val"].dtype.itemsize


def _sent_bytes(program: Program, start: fx.Node) -> int:
    """A rank sends its shards to the others of its node."""
    waits = waits_of(start)
    spec = program.spec(waits[0])
    assert spec is not None
    return (spec.layout.node_size - 1) * sum(_shard_bytes(program, wait) for wait in waits)
