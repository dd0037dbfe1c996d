"""Seeded faults: gradients that change places, lose their mean, or lie in a weight's memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import fx

from tests.hand_program import Hand
from tests.ir.test_verify import PARAMS, REPLICATED, V, W, refused
from zerofx.ir import ops
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.verify import verify

aten = torch.ops.aten


def _backward(*order: str | None) -> tuple[Program, dict[str, fx.Node]]:
    """Returns gradients of two weights and of an input, in their places but for `order`."""
    hand = Hand(PARAMS, Region.BACKWARD)
    made = {"local": hand.input("g", 4, 4)}
    for name in (W, V):
        made[name] = hand.reduced(hand.call(aten.mul.Tensor, made["local"], 2.0), hand.shard(name))
    outputs = [made[name] if name is not None else None for name in order]
    program = hand.program([*outputs, made["local"]], 0)
    return dataclasses.replace(program, gradients_of=(W, V, "")), made


def test_gradients_in_their_places() -> None:
    verify(_backward(W, V)[0], [], final=True)


@pytest.mark.parametrize("order", [(V, W), (W, None), (W, "local"), (W, W)])
def test_gradients_in_other_places(order: tuple[str | None, ...]) -> None:
    refused(_backward(*order)[0], "own_gradient", "is returned as the gradient of")


def test_write_to_a_gradient_that_is_sent() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    grad, shard = hand.input("g", 4, 4), hand.shard(W)
    start = hand.reduction(grad, shard)
    hand.call(aten.mul_.Scalar, hand.call(aten.t.default, grad), 0.5)
    reduced = hand.call(ops.REDUCE_WAIT, start, shard, param=W)
    refused(hand.program([reduced], 0), "nothing_written", f"what reduce.{W} is sending")


def test_write_to_a_gradient_that_has_arrived() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    grad, shard = hand.input("g", 4, 4), hand.shard(W)
    reduced = hand.reduced(grad, shard)
    hand.call(aten.mul_.Scalar, grad, 0.5)
    verify(hand.program([reduced], 0), [], final=True)


@pytest.mark.parametrize("params", [PARAMS, REPLICATED])
def test_weight_as_the_gradient_of_an_input(params: Any) -> None:
    hand = Hand(params, Region.BACKWARD)
    view = hand.call(aten.t.default, hand.unshard(hand.shard(W)))
    refused(hand.program([view], 0), "nothing_full_returned", f"parameter {W}")


@pytest.mark.parametrize("op", [ops.UNSHARD_START, ops.FREE, ops.REDUCE_START])
def test_layout_of_another_parameter(op: Any) -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    shard = hand.shard(W)
    full = hand.gather(shard)
    reduced = hand.reduced(hand.call(aten.mul.Tensor, full, 2.0), shard)
    hand.free(full)
    program = hand.program([reduced], 0)
    (node,) = program.calls(op)
    place = 2 if op is ops.REDUCE_START else 1
    node.update_arg(place, PARAMS[W].layout.handle + 1)
    refused(program, "own_layout", f"moves {W}")


def test_size_of_another_parameter() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard(W))
    hand.free(full)
    program = hand.program([])
    full.update_arg(2, [3, 4])
    refused(program, "own_layout", "is [3, 4], not [4, 4]")
