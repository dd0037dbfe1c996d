"""The golden cases of passes that send codes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from tests.hand_program import Hand
from tests.passes.golden import apply
from tests.program_builder import layout_of, specs_of
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.passes.base import Pass
from zerofx.passes.fuse_unshards import FuseUnshards
from zerofx.passes.quantize_reduces import QuantizeReduces
from zerofx.passes.quantize_unshards import QuantizeUnshards
from zerofx.passes.schedule import Schedule

aten = torch.ops.aten
_LARGE = specs_of({"w": (30, 30)}, layout_of(2))
_FIVE = specs_of({f"w{number}": (30, 30) for number in range(5)}, layout_of(2))
_SHAPES = {"table": (30, 30), "l.w": (30, 30), "l.bias": (30,), "l.small": (3, 3), "l.v": (30, 30)}
_KINDS = specs_of(_SHAPES, layout_of(4))
_KINDS["table"] = dataclasses.replace(_KINDS["table"], owners=("Embedding",))
_NODES = dataclasses.replace(layout_of(4), node_size=2)
_TWO_HOPS = specs_of({"w": (30, 30), "v": (30, 30)}, _NODES)


def gathered_and_freed() -> Program:
    hand = Hand(_LARGE)
    full = hand.gather(hand.shard("w"))
    y = hand.call(aten.mm.default, hand.input("x", 2, 30), full)
    hand.free(full)
    return hand.program([y])


def gathers_each() -> Program:
    hand = Hand(_KINDS)
    shards = [hand.shard(name) for name in _KINDS]
    fulls = [hand.gather(shard) for shard in shards]
    return hand.program([hand.call(aten.sum.default, full) for full in fulls])


def products_of_codes() -> Program:
    """One product for each weight, whose codes are gathered, read and freed right there."""
    hand = Hand(_FIVE)
    shards = [hand.shard(name) for name in _FIVE]
    x = hand.input("x", 2, 30)
    for shard in shards:
        full = hand.gather(shard)
        x = hand.call(aten.mm.default, x, full)
        hand.free(full)
    program = hand.program([x])
    apply(program, QuantizeUnshards("int8x64"))
    return program


def quantized() -> Program:
    """Neighbours of one layout, of which some send codes."""
    program = gathers_each()
    apply(program, QuantizeUnshards("int8x64", ("embed*",)))
    return program


def reduces_each(params: Mapping[str, ParamSpec]) -> Callable[[], Program]:
    def build() -> Program:
        hand = Hand(params, Region.BACKWARD)
        grads = [hand.input(f"g_{name}", *spec.shape) for name, spec in params.items()]
        shards = [hand.shard(name) for name in params]
        pairs = zip(grads, shards, strict=True)
        return hand.program([hand.reduced(grad, shard) for grad, shard in pairs])

    return build


CODE_CASES: dict[tuple[str, str], tuple[Pass, Callable[[], Program]]] = {
    ("quantize_unshards", "doc"): (QuantizeUnshards(), gathered_and_freed),
    ("quantize_unshards", "exact"): (QuantizeUnshards("int4x64", ("*embed*",)), gathers_each),
    ("fuse_unshards", "codes"): (FuseUnshards(target_bytes=1 << 20), quantized),
    ("schedule", "codes"): (Schedule(), products_of_codes),
    ("quantize_reduces", "doc"): (QuantizeReduces("int8x256", "int4x256"), reduces_each(_LARGE)),
    ("quantize_reduces", "two_hops"): (
        QuantizeReduces("int4x64", "int8x64"),
        reduces_each(_TWO_HOPS),
    ),
}
