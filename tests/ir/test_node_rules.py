"""Seeded faults around secondary shards."""

from __future__ import annotations

import dataclasses

from torch import fx

from tests.hand_program import Hand
from tests.ir.test_verify import PARAMS, V, W, refused
from tests.program_builder import layout_of, specs_of
from zerofx.ir import ops
from zerofx.ir.codes import sent
from zerofx.ir.facts import NODE, Role, facts, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout, Region
from zerofx.ir.verify import verify

_NODES = dataclasses.replace(layout_of(4), node_size=2, secondary=True)
_SECONDARY = specs_of({W: (4, 4), V: (4, 4)}, _NODES)


def _inside(hand: Hand, param: str) -> fx.Node:
    start = hand.start(hand.shard(param))
    set_facts(start, dataclasses.replace(facts(start), axis=NODE))
    return hand.wait(start)


def test_forward_gathers_over_all_ranks() -> None:
    hand = Hand(_SECONDARY)
    full = _inside(hand, W)
    refused(hand.program([full]), "inside_the_node", f"unshard.{W}", "before any rank of it")


def test_gather_inside_the_node_of_a_parameter_without_secondary_shards() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    full = _inside(hand, W)
    refused(hand.program([full]), "inside_the_node", f"gathers {W} inside the node, without")


def _forward(*kept: str) -> Program:
    hand = Hand(_SECONDARY)
    for param in (W, V):
        full = hand.gather(hand.shard(param))
        if param in kept:
            args = (full, full.args[1], _NODES.handle)
            hand.call(ops.KEEP_SHARD, *args, role=Role.FREE, param=param)
        hand.free(full)
    return dataclasses.replace(hand.program([]), read_later=frozenset((W, V)))


def test_forward_that_forgets_one() -> None:
    refused(_forward(W), "inside_the_node", f"full.{V} leaves no secondary shard")
    verify(_forward(W, V), ["add_secondary_shards"])


def test_bytes_that_leave_a_node() -> None:
    two_nodes = Layout(1, 4, 1, False, node_size=2)
    assert two_nodes.sent_across(300, reduces=False) == 100
    assert dataclasses.replace(two_nodes, node_size=4).sent_across(300, reduces=True) == 0
    assert dataclasses.replace(two_nodes, node_size=1).sent_across(300, reduces=False) == 300
    groups = Layout(1, 4, 2, False, node_size=4)  # one chunk of four goes to the other group
    assert groups.sent_across(400, reduces=True) == 100
    together = dataclasses.replace(groups, replica_node_size=2)
    assert together.sent_across(400, reduces=True) == 0, "all eight ranks share a node"
    assert Layout(1, 1, 4, False, node_size=4).sent_across(8, reduces=True) == 0
    assert Layout(1, 1, 4, False, node_size=2).sent_across(8, reduces=True) == 8


_CODES = dataclasses.replace(_NODES, secondary_codes=True)


def _coded(layout: Layout, region: Region, axis: str, *more: object) -> Program:
    """Gathers one matrix as codes, with what `more` says about keeping them."""
    hand = Hand(specs_of({"w": (40, 40)}, layout), region)
    args = ([hand.shard("w")], layout.handle, *more)
    start = hand.call(ops.UNSHARD_START, *args, role=Role.UNSHARD, param="w")
    set_facts(start, dataclasses.replace(facts(start), members=("w",), axis=axis))
    program = hand.program([hand.wait(start)])
    if ops.codecs(start):
        found = dataclasses.asdict(sent(program, start))
        set_facts(start, dataclasses.replace(facts(start), **found))
    return dataclasses.replace(program, read_later=frozenset("w"))


def test_codes_of_which_the_node_holds_numbers() -> None:
    program = _coded(_NODES, Region.BACKWARD, NODE, "int8x64")
    refused(program, "inside_the_node", "unshard.w gathers codes of w, of which its node holds")
    verify(_coded(_CODES, Region.BACKWARD, NODE, "int8x64"), ["add_secondary_shards"])


def test_only_a_forward_that_gathers_codes_keeps_them() -> None:
    for region, codec in ((Region.BACKWARD, "int8x64"), (Region.FORWARD, None)):
        program = _coded(_CODES, region, "shard", codec, True)
        refused(program, "inside_the_node", "unshard.w keeps codes, which only a forward")
    verify(_coded(_CODES, Region.FORWARD, "shard", "int8x64", True), ["add_secondary_shards"])


def test_codes_inside_a_node_state_their_bytes() -> None:
    program = _coded(_CODES, Region.BACKWARD, NODE, "int8x64")
    (start,) = program.calls(ops.UNSHARD_START)
    # 10 rows of 40 are 7 blocks with 8 slots for scales; two ranks' parcels go to one neighbour.
    assert facts(start).wire_bytes == 2 * (7 * 64 + 8 * 4)
    set_facts(start, dataclasses.replace(facts(start), wire_bytes=3))
    refused(program, "codes_as_stated", "unshard.w states 3 B")
