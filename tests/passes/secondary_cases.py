"""Golden cases of `add_secondary_shards`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from tests.hand_program import Hand
from tests.passes.cases import CASES, chain
from tests.passes.golden import apply
from tests.program_builder import layout_of, specs_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.add_secondary_shards import AddSecondaryShards
from zerofx.passes.fuse_unshards import FuseUnshards
from zerofx.passes.keep_unsharded import KeepUnsharded
from zerofx.passes.quantize_unshards import QuantizeUnshards

aten = torch.ops.aten
_NODES = dataclasses.replace(layout_of(4), node_size=2, secondary=True)
_ONE = specs_of({"w": (3, 3)}, _NODES)
_TWO = specs_of({"w": (3, 3), "v": (3, 3)}, _NODES)


def gathers_again(params: dict[str, object]) -> Callable[[], Program]:
    """A backward that gathers a bucket, and frees each value after its one use."""

    def build() -> Program:
        hand = Hand(params, Region.BACKWARD)  # type: ignore[arg-type]
        shards = [hand.shard(name) for name in params]
        start, dy = hand.start(*shards), hand.input("dy", 2, 3)
        fulls = [hand.wait(start, shard) for shard in shards]
        for full in fulls:
            dy = hand.call(aten.mm.default, dy, full)
            hand.free(full)
        return hand.program([dy])

    return build


def chain_kept(params: dict[str, object]) -> Callable[[], Program]:
    """`chain`, whose last value is kept for backward."""

    def build() -> Program:
        program = chain(params, later=tuple(params))()
        apply(program, KeepUnsharded())
        return program

    return build


_CODES = specs_of(
    {"w": (40, 40), "v": (40, 40), "b": (40,)}, dataclasses.replace(_NODES, secondary_codes=True)
)


def coded(region: Region) -> Callable[[], Program]:
    """Gathers two matrices as codes and a vector as it is, and frees each after its one use."""

    def build() -> Program:
        hand = Hand(_CODES, region)
        shards, x = [hand.shard(name) for name in _CODES], hand.input("x", 2, 40)
        for shard in shards:
            full = hand.gather(shard)
            op = aten.mm.default if full.meta["val"].dim() == 2 else aten.add.Tensor
            x = hand.call(op, x, full)
            hand.free(full)
        program = dataclasses.replace(hand.program([x]), read_later=frozenset(_CODES))
        apply(program, QuantizeUnshards("int8x64"))
        apply(program, FuseUnshards(1 << 20))
        return program

    return build


ALL_CASES = {
    **CASES,
    ("add_secondary_shards", "doc"): (AddSecondaryShards(), chain(_ONE, later=("w",))),
    ("add_secondary_shards", "kept"): (AddSecondaryShards(), chain_kept(_TWO)),
    ("add_secondary_shards", "backward"): (AddSecondaryShards(), gathers_again(_TWO)),
    ("add_secondary_shards", "codes"): (AddSecondaryShards(), coded(Region.FORWARD)),
    ("add_secondary_shards", "codes_backward"): (AddSecondaryShards(), coded(Region.BACKWARD)),
}
"""All of them."""
