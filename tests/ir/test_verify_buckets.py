"""Rules about collectives of several members."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.hand_program import Hand
from tests.ir.test_verify import PARAMS, V, W, refused
from zerofx.ir import ops
from zerofx.ir.facts import Role, facts, set_facts
from zerofx.ir.spec import Region
from zerofx.ir.verify import verify

aten = torch.ops.aten


def test_member_that_nobody_waits_for() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard(W), hand.shard(V))
    refused(hand.program([hand.wait(start)]), "one_wait", "0 times", f"by {V}")


def test_wait_for_no_member() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard(W))
    both = [hand.wait(start), hand.wait(start, hand.shard(V))]
    refused(hand.program(both), "one_wait", f"full.{V} waits for no member", f"unshard.{W}")


def test_shard_of_another_parameter() -> None:
    hand = Hand(PARAMS)
    shard = hand.call(aten.detach.default, hand.shard(V))
    args = ([shard], PARAMS[W].layout.handle)
    start = hand.call(ops.UNSHARD_START, *args, role=Role.UNSHARD, param=W)
    set_facts(start, dataclasses.replace(facts(start), members=(W,)))
    wait = hand.call(ops.UNSHARD_WAIT, start, shard, [4, 4], role=Role.FULL, param=W)
    refused(hand.program([wait]), "own_shard", f"full.{W} works on the shard of {V}")


def test_member_of_another_name() -> None:
    hand = Hand(PARAMS)
    shard = hand.shard(V)
    start = hand.start(shard)
    wait = hand.wait(start)
    set_facts(start, dataclasses.replace(facts(start), members=(W,)))
    refused(hand.program([wait]), "own_shard", f"the shard of {V}, not of {W}")


def test_gather_that_forgets_the_dtype_of_the_policy() -> None:
    params = {
        name: dataclasses.replace(spec, param_dtype=torch.bfloat16) for name, spec in PARAMS.items()
    }
    hand = Hand(params)
    shard = hand.shard(W)
    rebuilt = hand.wait(hand.start(shard))  # without the dtype
    refused(
        hand.program([rebuilt]), "own_dtype", f"full.{W}", "is torch.float64, not torch.bfloat16"
    )


def test_reduction_that_forgets_the_dtype_of_gradients() -> None:
    low = dataclasses.replace(PARAMS[W].layout, grad_dtype=torch.bfloat16)
    params = {name: dataclasses.replace(spec, layout=low) for name, spec in PARAMS.items()}
    for returned in (True, False):
        hand = Hand(params, Region.BACKWARD)
        shard, grad = hand.shard(W), hand.input("g", *params[W].shape)
        reduced = hand.reduced(grad, shard)  # without the dtype
        if returned:
            message = "is torch.float64, not torch.bfloat16"
            refused(hand.program([reduced], 0), "own_dtype", f"grad.{W}", message)
        else:
            # What computes with a gradient does so in the dtype that was traced.
            verify(hand.program([hand.call(aten.neg.default, reduced)], 0), ["the_pass"])


@pytest.mark.parametrize("op", [ops.FREE, ops.KEEP, ops.KEEP_SHARD])
def test_value_that_is_kept_as_that_of_another_parameter(op: Any) -> None:
    hand = Hand(PARAMS)
    w, v = hand.shard(W), hand.shard(V)
    full, other = hand.gather(w), hand.gather(v)
    y = hand.call(aten.mm.default, full, other)
    args = [full] if op is ops.FREE else [full, v]
    hand.call(op, *args, PARAMS[V].layout.handle, param=V)
    refused(hand.program([y]), "own_shard", f"is given the value of {W}")


def test_value_that_is_freed_while_a_reduction_sends_it() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    w, v = hand.shard(W), hand.shard(V)
    full = hand.gather(w)
    start = hand.reduction(hand.call(aten.view.default, full, [4, 4]), v)
    hand.free(full)
    wait = hand.call(ops.REDUCE_WAIT, start, v, param=V)
    words = ("free_follows_readers", f"reads full.{W} after it was freed")
    refused(hand.program([wait], 0), *words)
