"""Seeded faults: operations that write where others read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from tests.hand_program import Hand
from tests.ir.test_verify import PARAMS, REPLICATED, RESIDENT, V, W, refused
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
