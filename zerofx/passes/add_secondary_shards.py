"""Gather inside the node what this node has gathered before (hpZ)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import ClassVar

from torch import fx

from zerofx.ir.codes import kept_codes, note_sent, specs_of
from zerofx.ir.edit import Editor
from zerofx.ir.facts import NODE, Role, facts
from zerofx.ir.ops import FREE, KEEP, KEEP_SHARD, UNSHARD_START, codecs, started_by, waits_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class SecondaryPlan:
    """What a program leaves behind, and what it finds.

    Attributes:
        kept: ends of gathered values (`free` or `keep`) before which a secondary shard is kept.
        coded: gathers of which the codes are kept.
        shard_bytes: of all secondary shards that this program keeps, on each rank.
        inside: gathers that stay inside the node, each with the bytes that this rank sends.
    """

    kept: tuple[fx.Node, ...]
    coded: tuple[fx.Node, ...]
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
    parameters. Where the layout keeps codes, what travelled as codes is kept and gathered as such:
    `unshard_start([s], layout, 'int8x256', True)`.

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
            coded = tuple(start for start in _gathers(program) if _is_coded(program, start))
            kept = tuple(
                end
                for end in program.calls(FREE, KEEP)
                if _has_secondary(program, end) and started_by(end.all_input_nodes[0]) not in coded
            )
            held = sum(_shard_bytes(program, end) for end in kept)
            held += sum(kept_codes(program, start).wire_bytes for start in coded)
            return SecondaryPlan(kept, coded, held, ())
        inside = tuple((start, _sent_bytes(program, start)) for start in _gathers(program))
        return SecondaryPlan((), (), 0, inside)

    @staticmethod
    def there_later(forward: Program) -> tuple[tuple[fx.Node, int], ...]:
        """As `SecondaryPlan.inside`, for the forward of a later micro-batch.

        Gathers of codes find no codes where numbers are kept.
        """
        return tuple(
            (start, _sent_bytes(forward, start))
            for start in _gathers(forward)
            if forward.region is Region.FORWARD and (not codecs(start) or _is_coded(forward, start))
        )

    def apply(self, edit: Editor, plan: SecondaryPlan) -> None:
        """Insert nodes in forward, and say in backward where gathers go."""
        for end in plan.kept:
            full = end.all_input_nodes[0]
            shard, layout = full.args[1], end.args[-1]
            record = dataclasses.replace(facts(end), role=Role.FREE)
            edit.call_before(end, KEEP_SHARD, (full, shard, layout), record)
        for start in plan.coded:
            args = (*start.args[:3], True)
            edit.replace(start, edit.call_before(start, UNSHARD_START, args, facts(start)))
        self.stay_inside(edit, plan.inside)

    @staticmethod
    def stay_inside(edit: Editor, gathers: Iterable[tuple[fx.Node, int]]) -> None:
        """Say of gathers, each with the bytes that this rank sends, that they stay in the node."""
        for start, sent in gathers:
            edit.note(start, axis=NODE, wire_bytes=sent)
            note_sent(edit, start)


def _gathers(program: Program) -> list[fx.Node]:
    """Those of parameters that have secondary shards."""
    return [
        start
        for start in program.calls(UNSHARD_START)
        if all(_has_secondary(program, wait) for wait in waits_of(start))
    ]


def _is_coded(program: Program, start: fx.Node) -> bool:
    return bool(codecs(start)) and specs_of(program, start)[0].layout.secondary_codes


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
