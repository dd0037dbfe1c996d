"""Gather what is computed with, not what is kept."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import facts
from zerofx.ir.ops import UNSHARD, full_dtype
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import cast_to
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class Lowered:
    """One gather that moves fewer bytes.

    Attributes:
        marker: the full value, in the dtype of its shard.
        casts: all that reads it.
        dtype: what they cast it to.
        saved_bytes: of the full value.
    """

    marker: fx.Node
    casts: tuple[fx.Node, ...]
    dtype: torch.dtype
    saved_bytes: int


@dataclasses.dataclass(frozen=True)
class CastPlan:
    """Gathers that can travel in a lower dtype."""

    lowered: tuple[Lowered, ...]


@dataclasses.dataclass(frozen=True)
class CastBeforeGather(Pass):
    """A full value that is read only through casts to one smaller dtype is gathered in that dtype.

    `torch.autocast` casts weights right where they are used. To cast a shard and gather is the same
    as to gather and cast, bit for bit, and sends half the bytes. Gradients still travel as they
    are. Resident and replicated values are left alone: they are not gathered at each use.

    Before:
        w = unshard(shard); c = convert_element_type(w, bf16); y = mm(x, c)
    After:
        w = unshard(shard, bf16); y = mm(x, w)
    """

    name: ClassVar[str] = "cast_before_gather"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.JOINT, Region.INFERENCE))

    def plan(self, program: Program) -> CastPlan:
        """Find markers whose readers are casts to one dtype."""
        lowered: list[Lowered] = []
        for marker in program.calls(UNSHARD):
            spec = program.spec(marker)
            if spec is None or not spec.layout.temporary or full_dtype(marker) is not None:
                continue
            targets = {cast_to(reader) for reader in marker.users}
            dtype = targets.pop() if len(targets) == 1 else None
            fewer = spec.dtype.itemsize - dtype.itemsize if dtype is not None else 0
            if dtype is not None and fewer > 0:
                saved = fewer * spec.padded_numel
                lowered.append(Lowered(marker, tuple(marker.users), dtype, saved))
        return CastPlan(tuple(lowered))

    def apply(self, edit: Editor, plan: CastPlan) -> None:
        """State the dtype at the marker, and drop the casts."""
        for each in plan.lowered:
            shard, size, layout = each.marker.args[:3]
            args = (shard, size, layout, each.dtype)
            full = edit.call_before(each.marker, UNSHARD, args, facts(each.marker))
            for cast in each.casts:
                edit.replace(cast, full)
            edit.erase(each.marker)
