"""Golden cases of `copy_returned`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from tests.hand_program import Hand
from tests.program_builder import layout_of, specs_of
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass
from zerofx.passes.copy_returned import CopyReturned

aten = torch.ops.aten
_ONE = specs_of({"w": (3, 3)}, layout_of(2))
_TWO = specs_of({"w": (3, 3), "v": (3, 3)}, layout_of(2))
_RESIDENT = specs_of({"w": (3, 3)}, layout_of(2, resident=True))


def returns_weight() -> Program:
    hand = Hand(_ONE)
    full = hand.unshard(hand.shard("w"))
    y = hand.call(aten.mm.default, hand.input("x", 2, 3), full)
    return hand.program([y, full])


def returns_view() -> Program:
    hand = Hand(_RESIDENT, stage=2)
    full = hand.unshard(hand.shard("w"))
    first, second = (
        hand.call(operator.getitem, hand.call(aten.split.Tensor, full, 2), i) for i in (0, 1)
    )
    y = hand.call(aten.mm.default, hand.input("x", 2, 3), hand.call(aten.t.default, first))
    return hand.program([y, second])


def returns_weight_as_gradient() -> Program:
    """Of the input itself, and transposed of another weight."""
    hand = Hand(_TWO, Region.BACKWARD)
    v = hand.shard("v")
    full = hand.unshard(hand.shard("w"))
    turned = hand.call(aten.t.default, full)
    return hand.program([hand.reduce(turned, v), full], 0)


RETURN_CASES: dict[tuple[str, str], tuple[Pass, Callable[[], Program]]] = {
    ("copy_returned", "doc"): (CopyReturned(), returns_weight),
    ("copy_returned", "view"): (CopyReturned(), returns_view),
    ("copy_returned", "gradient"): (CopyReturned(), returns_weight_as_gradient),
}
