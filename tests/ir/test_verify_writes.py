"""Seeded faults: operations that write where others read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.hand_program import Hand
from tests.ir.test_verify import PARAMS, REPLICATED, RESIDENT, V, W, refused
from zerofx.ir import ops
from zerofx.ir.facts import Role
from zerofx.ir.verify import verify

aten = torch.ops.aten


@pytest.mark.parametrize("params", [PARAMS, RESIDENT, REPLICATED])
@pytest.mark.parametrize("viewed", [False, True])
def test_write_to_a_shard(params: Any, viewed: bool) -> None:
    hand = Hand(params)
    shard = hand.shard(W)
    target = hand.call(aten.view.default, shard, [-1]) if viewed else shard
    y = hand.call(aten.mul_.Scalar, target, 0.5)
    refused(hand.program([y]), "nothing_written", f"writes to shard.{W}")


@pytest.mark.parametrize("viewed", [False, True])
def test_write_to_a_full_value(viewed: bool) -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard(W))
    target = hand.call(aten.t.default, full) if viewed else full
    hand.call(aten.copy_.default, target, hand.input("x", 4, 4))
    hand.free(full)
    refused(hand.program([]), "nothing_written", f"writes to full.{W}")


def test_write_to_one_of_a_list() -> None:
    hand = Hand(PARAMS)
    shards = [hand.shard(name) for name in (W, V)]
    hand.call(aten._foreach_mul_.Scalar, shards, 0.5)
    refused(hand.program([]), "nothing_written", f"parameter {W}", f"parameter {V}")


def test_what_a_program_computes_may_be_written_to() -> None:
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard(W))
    x = hand.input("x", 4, 4)
    y = hand.call(aten.mm.default, x, full)
    z: fx.Node = hand.call(aten.relu_.default, y)
    hand.call(aten.copy_.default, x, z)
    hand.free(full)
    verify(hand.program([z]), ["the_pass"])


def test_read_of_an_input_after_a_write_to_it() -> None:
    hand = Hand(PARAMS)
    mean, x = hand.input("mean", 4, role=Role.BUFFER, param="mean"), hand.input("x", 4)
    hand.call(aten.copy_.default, mean, x)
    late = hand.call(aten.add.Tensor, hand.call(aten.view.default, mean, [2, 2]), 1.0)
    refused(hand.program([late]), "read_before_written", "reads buffer.mean after a write")


@pytest.mark.parametrize("function", [torch.relu_, torch.relu])
def test_functions_that_are_no_operators_may_write_to_anything(function: Any) -> None:
    hand = Hand(PARAMS)
    y = hand.call(function, hand.call(aten.add.Tensor, hand.input("x", 4), 1.0))
    refused(hand.program([y]), "known_operations", "no operation that torch knows")


def test_read_of_a_buffer_before_ranks_have_one_value() -> None:
    hand = Hand(PARAMS)
    mean = hand.input("mean", 4, role=Role.BUFFER, param="mean")
    early = hand.call(aten.add.Tensor, mean, 1.0)
    hand.call(ops.SYNC_BUFFERS, [mean], 0, role=Role.SYNC)
    program = hand.program([early])
    refused(program, "buffers_follow", "before ranks have one value", final=True)
