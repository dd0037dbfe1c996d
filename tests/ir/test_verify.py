"""Seeded faults: each is caught by its rule, which names parameter, module, node and pass."""

from __future__ import annotations

import collections
import operator

import pytest
import torch

from tests.hand_program import Hand
from tests.passes.models import compile_all, layout_for, mlp, passes_for
from tests.program_builder import layout_of, specs_of, trace_joint
from zerofx.errors import VerificationError
from zerofx.ir import ops
from zerofx.ir.facts import Role
from zerofx.ir.program import Program
from zerofx.ir.return_rules import SMALL_NUMEL
from zerofx.ir.rules import RULES
from zerofx.ir.spec import Region
from zerofx.ir.verify import peak_full_bytes, verify

aten = torch.ops.aten
W, V = "layers.0.weight", "layers.1.weight"
PARAMS = specs_of({W: (4, 4), V: (4, 4)}, layout_of(2))
RESIDENT = specs_of({W: (4, 4)}, layout_of(2, resident=True))
REPLICATED = specs_of({W: (4, 4)}, layout_of(2), small=100)


def refused(program: Program, rule: str, *words: str, **options: object) -> None:
    """`program` breaks `rule`, and the message holds `words`."""
    with pytest.raises(VerificationError) as caught:
        verify(program, ["copy_returned", "the_pass"], **options)  # type: ignore[arg-type]
    assert caught.value.rule == rule, str(caught.value)
    for word in (*words, "after pass the_pass", "Remedy: ", "Rule: "):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_dropped_wait() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard(W))
    y = hand.call(aten.relu.default, start)
    refused(
        hand.program([y]), "one_wait", f"parameter {W}", "module layers.0", f"unshard.{W} is waited"
    )


def test_reader_that_does_not_wait() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard(W))
    hand.wait(start)
    y = hand.call(aten.relu.default, start)
    refused(hand.program([y]), "one_wait", "%0 reads", "before the wait", f"parameter {W}")


def test_second_wait() -> None:
    hand = Hand(PARAMS)
    start = hand.start(hand.shard(W))
    refused(hand.program([hand.wait(start), hand.wait(start)]), "one_wait", "2 times")


def test_dropped_wait_of_a_reduction() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    start = hand.reduction(hand.input("g", 4, 4), hand.shard(W))
    refused(hand.program([start]), "one_wait", f"reduce.{W}", f"parameter {W}")


def test_wait_without_start() -> None:
    hand = Hand(PARAMS)
    args = (hand.input("p", 0), hand.shard(W), [4, 4])
    wait = hand.call(ops.UNSHARD_WAIT, *args, role=Role.FULL, param=W)
    refused(hand.program([wait]), "one_wait", "not started")


def test_waits_out_of_order() -> None:
    hand = Hand(PARAMS)
    first, second = hand.start(hand.shard(W)), hand.start(hand.shard(V))
    late, early = hand.wait(second), hand.wait(first)
    refused(hand.program([hand.call(aten.mm.default, late, early)]), "waits_in_order", W)


def test_second_gather_of_a_parameter() -> None:
    hand = Hand(PARAMS)
    shard = hand.shard(W)
    one, two = hand.gather(shard), hand.gather(shard)
    program = hand.program([hand.call(aten.mm.default, one, two)])
    verify(program, [])
    refused(program, "one_gather", f"unshard.{W}#1 gathers what unshard.{W}", final=True)


def test_missing_free() -> None:
    program = _product(free=())
    verify(program, ["insert_unshards"])
    refused(program, "freed_once", f"full.{W} is freed 0 times", f"parameter {W}", final=True)
    with pytest.raises(VerificationError, match="freed_once"):
        verify(program, ["insert_frees"])


def test_double_free() -> None:
    refused(_product(free=("end", "end")), "freed_once", "2 times", final=True)


@pytest.mark.parametrize("place", ["wait", "view"])
def test_early_free(place: str) -> None:
    program = _product(free=(place,))
    words = ("%1 reads", f"full.{W} after it was freed", f"parameter {W}", "module layers.0")
    refused(program, "free_follows_readers", *words)


def test_output_is_a_reader() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    full = hand.gather(hand.shard(W))
    rows = hand.call(operator.getitem, hand.call(aten.split.Tensor, full, 2), 1)
    hand.free(full)
    refused(hand.program([rows]), "free_follows_readers", "output")


def test_right_free() -> None:
    verify(_product(free=("end",)), ["insert_frees"], final=True)


@pytest.mark.parametrize("params", [RESIDENT, REPLICATED])
def test_free_of_a_value_that_stays(params: dict[str, object]) -> None:
    hand = Hand(params, stage=3)  # type: ignore[arg-type]
    full = hand.gather(hand.shard(W))
    y = hand.call(aten.mm.default, hand.input("x", 2, 4), full)
    hand.free(full)
    refused(hand.program([y]), "only_gathered_freed", f"frees full.{W}")


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("marker", [False, True])
def test_full_weight_saved_for_backward(view: bool, marker: bool) -> None:
    hand = Hand(PARAMS)
    shard = hand.shard(W)
    full = hand.unshard(shard) if marker else hand.gather(shard)
    y = hand.call(aten.mm.default, hand.input("x", 2, 4), full)
    saved = hand.call(aten.t.default, full) if view else full
    words = (f"is or views full.{W}", f"parameter {W}", "module layers.0", "recompute")
    refused(hand.program([y, saved], 1), "nothing_full_saved", *words)


def test_value_made_of_weights_alone_saved_for_backward() -> None:
    def build(rows: int) -> Program:
        params = specs_of({W: (rows, 4)}, layout_of(2))
        hand = Hand(params)
        scale = hand.call(aten.mul.Tensor, hand.gather(hand.shard(W)), 2.0)
        return hand.program([hand.call(aten.sum.default, scale), scale], 1)

    refused(build(SMALL_NUMEL), "nothing_full_saved", "full parameters alone")
    verify(build(2), [])


def test_resident_value_may_be_saved() -> None:
    hand = Hand(RESIDENT, stage=2)
    full = hand.gather(hand.shard(W))
    y = hand.call(aten.mm.default, hand.input("x", 2, 4), full)
    verify(hand.program([y, full], 1), ["insert_unshards"], final=True)


@pytest.mark.parametrize("params", [PARAMS, RESIDENT, REPLICATED])
def test_full_weight_returned_to_the_user(params: dict[str, object]) -> None:
    hand = Hand(params, stage=2)  # type: ignore[arg-type]
    shard = hand.shard(W)
    full = shard if params is REPLICATED else hand.gather(shard)
    view = hand.call(aten.t.default, full)
    refused(hand.program([view]), "nothing_full_returned", "%0 is returned", f"parameter {W}")


@pytest.mark.parametrize("region", [Region.JOINT, Region.BACKWARD])
def test_doubled_reduction_of_a_parameter(region: Region) -> None:
    hand = Hand(PARAMS, region)
    shard, g = hand.shard(W), hand.input("g", 4, 4)
    one, two = hand.reduce(g, shard), hand.reduce(g, shard)
    program = hand.program([hand.call(aten.add.Tensor, one, two)], 0)
    words = (f"grad.{W}#1 reduces a gradient", f"parameter {W}")
    refused(program, "one_reduction", *words, final=region is Region.JOINT)


def test_reduction_of_a_reduced_gradient() -> None:
    params = specs_of({W: (4, 4), V: (2, 4)}, layout_of(2))
    hand = Hand(params, Region.BACKWARD)
    once = hand.reduce(hand.input("g", 4, 4), hand.shard(W))
    again = hand.reduce(hand.call(aten.mul.Tensor, once, 2.0), hand.shard(V))
    refused(hand.program([once, again]), "reduced_before", f"what grad.{W} already reduced")


def test_gradient_that_nobody_reduced() -> None:
    program = trace_joint(mlp(layout_of(2)))
    verify(program, [])
    (marker,) = [n for n in program.calls(ops.REDUCE_GRAD) if n.meta["zerofx"].param == "b.weight"]
    marker.replace_all_uses_with(marker.args[0])  # type: ignore[arg-type]
    program.graph.erase_node(marker)
    refused(program, "every_gradient_reduced", "is the gradient of b.weight", "parameter b.weight")


_Part = collections.namedtuple("_Part", "base attr")
_Gradient = collections.namedtuple("_Gradient", "grad_of")


def test_gradients_of_inputs_of_several_parts() -> None:
    """Described as AOTAutograd does: a frozen one has a single None, the other two values."""
    hand = Hand(PARAMS, Region.JOINT)
    inputs = []
    for name in (W, V):
        inputs += [hand.shard(name), hand.input(f"mesh_{name[7]}", role=Role.MESH, param=name)]
    grad = hand.input("g", 4, 4)
    right = hand.program([None, hand.reduce(grad, inputs[2]), inputs[3], None], 0)
    parts = [_Part(name, attribute) for name in (W, V) for attribute in ("shard", "mesh")]
    for node, desc in zip((*inputs, grad), (*parts, "tangent"), strict=True):
        node.meta["desc"] = desc
    gradient = _Gradient(V)
    right.output.meta["desc"] = [None, _Part(gradient, "shard"), _Part(gradient, "mesh"), None]
    verify(right, [], final=True)
    right.output.args = ((None, grad, inputs[3], None),)
    refused(right, "every_gradient_reduced", f"is the gradient of {V}", f"parameter {V}")


def test_marker_left() -> None:
    hand = Hand(PARAMS)
    y = hand.call(aten.mm.default, hand.input("x", 2, 4), hand.unshard(hand.shard(W)))
    program = hand.program([y])
    verify(program, ["the_pass"])
    refused(program, "no_marker_left", f"full.{W} is a marker", f"parameter {W}", final=True)


def test_reader_before_its_value() -> None:
    hand = Hand(PARAMS)
    x = hand.call(aten.relu.default, hand.input("x", 2))
    y = hand.call(aten.relu.default, x)
    y.append(x)
    refused(hand.program([y]), "read_in_order", "before it exists")


def test_bytes_in_flight() -> None:
    one = 4 * 4 * 8
    assert peak_full_bytes(_product(free=("end",))) == one
    hand = Hand(PARAMS)
    fulls = [hand.gather(hand.shard(name)) for name in (W, V)]
    y = hand.call(aten.mm.default, *fulls)
    for full in fulls:
        hand.free(full)
    program = hand.program([y])
    assert peak_full_bytes(program) == 2 * one
    verify(program, [], final=True, budget_bytes=2 * one)
    words = (f"unshard.{V} raises the bytes in flight to {2 * one}", f"parameter {V}")
    refused(program, "within_budget", *words, budget_bytes=2 * one - 1)


def test_padding_counts_as_bytes_in_flight() -> None:
    hand = Hand(specs_of({W: (5, 3)}, layout_of(4)))
    program = hand.program([hand.call(aten.sum.default, hand.gather(hand.shard(W)))])
    assert peak_full_bytes(program) == 8 * 3 * 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_good_programs_break_no_rule(stage: int) -> None:
    for program in compile_all(mlp(layout_for(stage, 2, 1)), stage, passes_for(stage)):
        verify(program, [each.name for each in passes_for(stage)], final=True)


def test_rules_are_sentences() -> None:
    for rule in RULES:
        doc = rule.check.__doc__
        assert doc and doc.splitlines()[0].endswith("."), rule.name
        assert rule.name == rule.check.__name__ and rule.remedy


def test_all_offences_are_listed() -> None:
    hand = Hand(PARAMS)
    fulls = [hand.gather(hand.shard(name)) for name in (W, V)]
    with pytest.raises(VerificationError) as caught:
        verify(hand.program([hand.call(aten.mm.default, *fulls)]), [], final=True)
    assert f"full.{W}" in str(caught.value) and f"full.{V}" in str(caught.value)
    assert "before any pass" in str(caught.value)


def _product(free: tuple[str, ...]) -> Program:
    """Two readers behind a view of a gathered value; freed after the nodes that `free` names."""
    hand = Hand(PARAMS)
    full = hand.gather(hand.shard(W))
    x = hand.input("x", 4, 4)
    view = hand.call(aten.t.default, full)
    y = hand.call(aten.mm.default, x, view)
    z = hand.call(aten.mm.default, y, view)
    anchors = {"wait": full, "view": view, "end": z}
    for place in free:
        anchors[place].append(hand.free(full))
    return hand.program([hand.call(aten.relu.default, z)])
