"""Send gradients as codes (qgZ)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.kernels import errors_of, reduce_kernels
from zerofx.ir.ops import REDUCE_START, gradients
from zerofx.ir.parcels import Codec
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.passes.base import Numerics, Pass
from zerofx.passes.quantize import QuantizePlan, Weighed, plan_codes, send_codes, why_exact


@dataclasses.dataclass(frozen=True)
class QuantizeReduces(Pass):
    """Reductions send block-quantized codes instead of numbers (qgZ, ZeRO++ §3.3).

    An all-to-all inside the node, the mean in fp32, quantized again, and an all-to-all across
    nodes; one hop where a rank has no neighbour on its node, or all ranks share it. The result is
    the mean over all ranks. What stays exact is what `QuantizeUnshards` leaves exact. A hop whose
    codec ends in `.feedback` keeps what coding took, and adds it before it codes the next time.

    Attributes:
        codec: inside a node, or of the only hop.
        across: between nodes.
        exact: patterns of names that stay as they are.
        weighed: whether codes pay in this graph; by default they are wanted in any case.

    Before:
        p = reduce_start([g], [s]); a = reduce_wait(p, s)
    After:
        p = reduce_start([g], [s], ['int8x256', 'int4x256']); a = reduce_wait(p, s)
    """

    codec: str = "int8x256"
    across: str = "int8x256"
    exact: tuple[str, ...] = ()
    weighed: Weighed | None = None

    name: ClassVar[str] = "quantize_reduces"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.BACKWARD,))
    numerics: ClassVar[Numerics] = "lossy"

    def plan(self, program: Program) -> QuantizePlan:
        """Decide for each parameter."""
        starts = program.calls(REDUCE_START)
        codecs = [Codec.parse(self.codec), Codec.parse(self.across)]
        weighed = self.weighed
        return plan_codes(program, starts, codecs, self.exact, _dtype, weighed, reduces=True)

    def apply(self, edit: Editor, plan: QuantizePlan) -> None:
        """Name the codecs at each reduction."""
        send_codes(edit, plan, edit.program.calls(REDUCE_START), list(plan.codecs))

    def kept_bytes(self, spec: ParamSpec) -> int:
        """Bytes that a rank keeps of a parameter from step to step: errors, with feedback."""
        codecs = Codec.parse(self.codec), Codec.parse(self.across)
        if not spec.trainable or why_exact(spec, codecs, self.exact, reduces=True):
            return 0
        kernels = reduce_kernels([spec], *codecs, spec.layout.num_nodes)
        hops = [each for each in (kernels.pack, kernels.repack) if each is not None]
        return sum(math.prod(shape) for each in hops for shape, _ in errors_of(each))


def _dtype(start: fx.Node) -> torch.dtype:
    return gradients(start)[0].meta["val"].dtype
