"""Send weights as codes (qwZ)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import fx

from zerofx.ir.edit import Editor
from zerofx.ir.facts import facts
from zerofx.ir.kernels import unshard_kernels
from zerofx.ir.ops import UNSHARD_START, waits_of
from zerofx.ir.parcels import Codec
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.passes.base import RUNNING, Numerics, Pass
from zerofx.passes.quantize import Exact, QuantizePlan, Weighed, plan_codes, send_codes, why_exact


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
        weighed: whether codes pay in this graph; by default they are wanted in any case.
        frozen_only: what is trained stays exact. A frozen weight is coded once and kept as codes.

    Before:
        p = unshard_start([s]); w = unshard_wait(p, s); y = mm(x, w); free(w)
    After:
        p = unshard_start([s], 'int8x256'); w = unshard_wait(p, s); y = mm(x, w); free(w)
    """

    codec: str = "int8x256"
    exact: tuple[str, ...] = ()
    weighed: Weighed | None = None
    frozen_only: bool = False

    name: ClassVar[str] = "quantize_unshards"
    regions: ClassVar[frozenset[Region]] = RUNNING
    numerics: ClassVar[Numerics] = "lossy"

    def plan(self, program: Program) -> QuantizePlan:
        """Decide for each parameter."""
        starts = program.calls(UNSHARD_START)
        codecs = [Codec.parse(self.codec)]
        plan = plan_codes(program, starts, codecs, self.exact, _dtype, self.weighed)
        why = {start: self._why_exact(program, start) for start in plan.quantized}
        exact = tuple(Exact(facts(start).param, reason) for start, reason in why.items() if reason)
        quantized = tuple(start for start, reason in why.items() if not reason)
        return dataclasses.replace(plan, quantized=quantized, exact=plan.exact + exact)

    def _why_exact(self, program: Program, start: fx.Node) -> str:
        """Why a gather that could send codes does not; empty if it does."""
        spec = program.params[facts(start).param]
        if self.frozen_only and spec.trainable:
            return "trained"
        # Where secondary shards are numbers, backward gathers inside the node what forward decoded:
        # codes of that would lose twice.
        numbers = program.region is Region.BACKWARD and _has_numbers(program, start)
        return "inside the node" if numbers else ""

    def apply(self, edit: Editor, plan: QuantizePlan) -> None:
        """Name the codec at each gather."""
        send_codes(edit, plan, edit.program.calls(UNSHARD_START), plan.codecs[0])

    def kept_bytes(self, spec: ParamSpec) -> int:
        """Bytes that a rank keeps of a parameter from step to step: codes, if it is frozen."""
        codec = Codec.parse(self.codec)
        if spec.trainable or why_exact(spec, [codec], self.exact):
            return 0
        return unshard_kernels([spec], codec).pack.parcels.shape[1]


def _has_numbers(program: Program, start: fx.Node) -> bool:
    spec = program.spec(waits_of(start)[0])
    return spec is not None and spec.layout.secondary and not spec.layout.secondary_codes


def _dtype(start: fx.Node) -> torch.dtype:
    return waits_of(start)[0].meta["val"].dtype
