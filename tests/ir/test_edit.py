"""The door through which passes edit: what would make values lie is refused."""

from __future__ import annotations

import pytest
import torch

from tests.hand_program import Hand
from tests.program_builder import layout_of, specs_of
from zerofx.ir.edit import Editor
from zerofx.ir.spec import Region

aten = torch.ops.aten


def test_an_input_is_replaced_by_its_like_only() -> None:
    hand = Hand(specs_of({"a": (4, 3)}, layout_of(2)), Region.FORWARD)
    x, like, other = hand.input("x", 2, 3), hand.input("like", 2, 3), hand.input("other", 3, 2)
    y = hand.call(aten.mul.Tensor, x, x)
    edit = Editor(hand.program([y]), "mine")
    with pytest.raises(ValueError, match="does not read"):
        edit.set_input(y, like, x)
    with pytest.raises(ValueError, match="cannot replace"):
        edit.set_input(y, x, other)
    edit.set_input(y, x, like)
    assert y.args == (like, like)
