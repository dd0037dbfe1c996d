"""What a plan says about the wire: who sends what, as which codes, and how far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import sympy

from zerofx.cli.units import show_bytes, show_seconds
from zerofx.config import ZeroConfig
from zerofx.cost.memory import PSI, Precision, States, formula, wire_formula
from zerofx.frontend.planner import StagePlan
from zerofx.frontend.weigh import pays
from zerofx.ir.parcels import Codec
from zerofx.option_checks import at_stage
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.passes.quantize_unshards import QuantizeUnshards


@dataclasses.dataclass(frozen=True)
class Rates:
    """Bytes of a number on the wire and in copies, for the formulas of one stage.

    Attributes:
        stage: ZeRO stage.
        precision: of parameters and optimizer.
        gather: in a gather; `None`: as it is.
        reduce: in the two hops of a reduction; `None`: as it is.
        per_node: ranks of a node; 0: all share one.
        copy: in a secondary shard; `None`: there is none.
        cast: in full values, if `param_dtype` casts parameters; `None`: it does not.
        trained: number of parameters that have gradients.
    """

    stage: int
    precision: Precision
    gather: Any
    reduce: tuple[Any, Any] | None
    per_node: int
    copy: Any
    cast: int | None = None
    trained: Any = PSI

    @staticmethod
    def of(
        plan: StagePlan,
        config: ZeroConfig,
        precision: Precision,
        num_ranks: int,
        trained: Any = PSI,
    ) -> Rates:
        """Those of a plan that was made with `config` for so many ranks."""
        at = at_stage(config, plan.stage)
        weights = at.weight_codec if pays(plan.weighed, QuantizeUnshards.name) else None
        grads = at.gradient_codecs if pays(plan.weighed, QuantizeReduces.name) else None
        gather = None if weights is None else _bytes(weights)
        cast = config.param_dtype
        size = None if cast is None or precision.dtypes == (cast,) else cast.itemsize
        copy = (precision.param if size is None else size) if at.secondary_shards else None
        if at.secondary_shards == "codes" and gather is not None:
            copy = gather
        reduce = None if grads is None else (_bytes(grads[0]), _bytes(grads[1]))
        per_node = config.ranks_per_node or 0
        per_node = per_node if per_node < num_ranks else 0
        return Rates(plan.stage, precision, gather, reduce, per_node, copy, size, trained)

    def states(self) -> States:
        """Model states in Ψ, τ and W."""
        kept = self.per_node if self.copy is not None else 0
        return formula(self.stage, self.precision, kept, self.copy, self.cast, self.trained)

    def sent(self) -> Any:
        """What a rank sends in a step, in Ψ, τ and W."""
        return wire_formula(
            self.stage,
            self.precision,
            self.gather,
            self.reduce,
            self.per_node,
            self.copy,
            self.cast,
            self.trained,
        )


def wire_data(plan: StagePlan) -> list[dict[str, Any]]:
    """For `--json`: a row for each kind of collective and what it sends."""
    return [
        {
            "region": region,
            "kind": kind,
            "wire_dtype": dtype,
            "sent_bytes": round(sent),
            "scale_bytes": round(scales),
            "inside_node_bytes": round(sent - across),
            "across_nodes_bytes": round(across),
        }
        for (region, kind, dtype), (sent, scales, across) in plan.traffic.items()
    ]


def wire_text(stages: Mapping[int, StagePlan]) -> str:
    """The same in words, where codes travel or might; empty elsewhere."""
    lines = [line for _, plan in sorted(stages.items()) for line in _lines(plan)]
    return "\n".join(["on the wire:", *lines]) if lines else ""


def _lines(plan: StagePlan) -> Iterator[str]:
    for name, each in plan.weighed.items():
        chosen = "codes" if each.pays else "numbers"
        what = "weights" if name == QuantizeUnshards.name else "gradients"
        yield (
            f"  zero{plan.stage}  auto: {what} as {chosen}; forward and backward "
            f"{show_seconds(each.exact)} with numbers, {show_seconds(each.coded)} with codes"
        )
    if not plan.weighed and not any(scales for _, scales, _ in plan.traffic.values()):
        return
    for (region, kind, dtype), (sent, scales, across) in plan.traffic.items():
        yield (
            f"  zero{plan.stage}  {region:<8} {kind}  {show_bytes(sent):>8} as {dtype}"
            + (f", scales {show_bytes(scales)}" if scales else "")
            + f", {show_bytes(sent - across)} inside a node, {show_bytes(across)} across"
        )


def _bytes(codec: str) -> Any:
    """Bytes of a number in whole blocks, scales included."""
    found = Codec.parse(codec)
    return sympy.Rational(found.parcel_bytes(4), 4 * found.block)
