"""Who reads a value's memory: views in all their forms count, copies do not."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from tests.hand_program import Hand
from tests.program_builder import layout_of, specs_of
from zerofx.ir.view import alias_closure, identity_source, readers

aten = torch.ops.aten
PARAMS = specs_of({"w": (4, 4)}, layout_of(2))

VIEWS = [
    (aten.view.default, [16]),
    (aten._unsafe_view.default, [16]),
    (aten.reshape.default, [2, 8]),
    (aten.t.default,),
    (aten.transpose.int, 0, 1),
    (aten.permute.default, [1, 0]),
    (aten.expand.default, [2, 4, 4]),
    (aten.slice.Tensor, 0, 1, 3),
    (aten.select.int, 0, 1),
    (aten.as_strided.default, [2, 2], [1, 2]),
    (aten.diagonal.default,),
    (aten.squeeze.default,),
    (aten.unsqueeze.default, 0),
    (aten.detach.default,),
    (aten.alias.default,),
    (aten.split.Tensor, 2),
    (aten.split_with_sizes.default, [1, 3]),
    (aten.unsafe_split.Tensor, 2),
    (aten.unsafe_split_with_sizes.default, [1, 3]),
    (aten.unbind.int,),
    (aten.contiguous.default,),
]
COPIES = [
    (aten.clone.default,),
    (aten._to_copy.default,),
    (aten.relu.default,),
    (aten.mul.Tensor, 1.0),
    (aten.sum.default,),
    (aten.view_copy.default, [16]),
]


@pytest.mark.parametrize("call", VIEWS, ids=lambda call: str(call[0]))
def test_views_share_memory(call: tuple[object, ...]) -> None:
    hand, full, view = _call(call)
    reader = hand.call(aten.relu.default, view)
    assert view in alias_closure(full)
    assert reader in readers(full)


@pytest.mark.parametrize("call", COPIES, ids=lambda call: str(call[0]))
def test_copies_do_not(call: tuple[object, ...]) -> None:
    hand, full, copy = _call(call)
    reader = hand.call(aten.relu.default, copy)
    assert copy not in alias_closure(full) and reader not in readers(full)


def test_output_reads() -> None:
    _, full, view = _call((aten.t.default,))
    view.graph.output((view,))
    assert view.graph.output_node() in readers(full)


def test_identity_source_follows_views_of_the_same_shape() -> None:
    hand = Hand(PARAMS)
    x = hand.input("x", 4, 2)
    same = hand.call(aten.detach.default, hand.call(aten.view.default, x, [4, 2]))
    other = hand.call(aten.view.default, same, [8])
    assert identity_source(same) is x
    assert identity_source(other) is other
    assert identity_source(hand.call(aten.t.default, x)) is not x


def _call(call: tuple[object, ...]) -> tuple[Hand, fx.Node, fx.Node]:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard("w"))
    node = hand.call(call[0], full, *call[1:])
    if isinstance(node.meta["val"], (list, tuple)):
        node = hand.call(operator.getitem, node, 0)
    return hand, full, node
