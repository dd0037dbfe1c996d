"""Send weights as codes (qwZ)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.ops import UNSHARD_START, waits_of
from zerofx.ir.parcels import Codec
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass
from zerofx.passes.quantize import QuantizePlan, plan_codes, send_codes


@dataclasses.dataclass(frozen=True)
class QuantizeUnshards(Pass):
    """Gathers send block-quantized codes instead of numbers (qwZ, ZeRO++ §3.1).

    Each rank codes its shard as it is at rest, and all ranks, the owner included, compute with what
    the codes say: the same values everywhere, in forward as in backward. Norms and biases (of one
    dimension), names that match a pattern, and tensors too small for a block stay exact; gathers
    say why.

    Attributes:
        codec: how numbers are written.
        exact: patterns of names that stay as they are.

    Before:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); free(w)
    After:
        p = unshard_start([s], 'int8x256'); w = unshard_wait(p, s); y = mm(x, w); free(w)
    """

    codec: str = "int8x256"
    exact: tuple[str, ...] = ()

    name: ClassVar[str] = "quantize_unshards"
    regions: ClassVar[frozenset[Region]] = frozenset(
        (Region.FORWARD, Region.BACKWARD, Region.INFERENCE)
    )
    numerics: ClassVar[Literal["exact", "reordered", "lossy"]] = "lossy"

    def plan(self, program: Program) -> QuantizePlan:
        """Decide for each parameter."""
        starts = program.calls(UNSHARD_START)
        return plan_codes(program, starts, [Codec.parse(self.codec)], self.exact, _dtype)

    def apply(self, edit: Editor, plan: QuantizePlan) -> None:
        """Name the codec at each gather."""
        send_codes(edit, plan, edit.program.calls(UNSHARD_START), plan.codecs[0])


def _dtype(start: fx.Node) -> torch.dtype:
    return waits_of(start)[0].meta["val"].dtype
