"""Seeded faults: passes that keep every rule of communication, and compute something else."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from tests.hand_program import Hand
from tests.ir.test_verify import PARAMS, V, W
from tests.passes.models import compile_all, layout_for, mlp, passes_for
from zerofx.errors import VerificationError
from zerofx.ir import ops
from zerofx.ir.edit import Editor
from zerofx.ir.facts import Facts
from zerofx.ir.meaning import Meanings
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass, run_passes

aten = torch.ops.aten
Change = Callable[[Editor], Any]


@dataclasses.dataclass(frozen=True)
class Edit(Pass):
    """Does `change`."""

    change: Change

    name: ClassVar[str] = "the_edit"
    regions: ClassVar[frozenset[Region]] = frozenset(Region)

    def plan(self, program: Program) -> Any:
        return ()

    def apply(self, edit: Editor, plan: Any) -> None:
        self.change(edit)


class Replacing(Edit):
    """Is meant to compute something else."""

    replaces: ClassVar[bool] = True


def refused(program: Program, change: Change, *words: str) -> None:
    with pytest.raises(VerificationError) as caught:
        run_passes(program, [Edit(change)])
    assert caught.value.rule == "same_values", str(caught.value)
    for word in (*words, "after pass the_edit", "replaces = True"):
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


def test_saved_activations_exchanged() -> None:
    hand = Hand(PARAMS)
    x = hand.input("x", 4, 4)
    one, two = hand.call(aten.relu.default, x), hand.call(aten.sigmoid.default, x)
    y = hand.call(aten.add.Tensor, one, two)

    def exchange(edit: Editor) -> None:
        edit.program.output.args = ((y, two, one),)

    refused(
        hand.program([y, one, two], 1),
        exchange,
        "saved value 0 as sigmoid(x) instead of relu(x)",
        "saved value 1 as relu(x) instead of sigmoid(x)",
    )


def test_reduction_of_another_gradient() -> None:
    hand = Hand(PARAMS, Region.BACKWARD)
    one, two = hand.input("one", 4, 4), hand.input("two", 4, 4)
    shards = hand.shard(W), hand.shard(V)
    starts = [hand.reduction(grad, of) for grad, of in zip((one, two), shards, strict=True)]
    waits = [
        hand.call(ops.REDUCE_WAIT, start, shard, param=name)
        for start, shard, name in zip(starts, shards, (W, V), strict=True)
    ]
    program = dataclasses.replace(hand.program(waits, 0), gradients_of=(W, V))
    change = f"the gradient of {V} as one instead of two"
    refused(program, lambda edit: edit.set_input(starts[1], two, one), change)


def test_another_weight() -> None:
    hand = Hand(PARAMS)
    x, w, v = hand.input("x", 4, 4), hand.shard(W), hand.shard(V)
    one, two = hand.gather(w), hand.gather(v)
    y = hand.call(aten.mm.default, hand.call(aten.mm.default, x, one), two)
    program = hand.program([y])
    for full in (one, two):
        with program.graph.inserting_before(program.output):
            hand.free(full)
    refused(
        program,
        lambda edit: edit.set_input(y, two, one),
        f"output 0 as {W} instead of {V}",
    )


def test_another_constant() -> None:
    hand = Hand(PARAMS)
    x = hand.input("x", 4)
    doubled = hand.call(aten.mul.Tensor, x, 2.0)

    def triple(edit: Editor) -> None:
        edit.replace(doubled, edit.call_before(doubled, aten.mul.Tensor, (x, 3.0), Facts()))

    refused(hand.program([doubled]), triple, "output 0 as 3.0 instead of 2.0")


def test_another_operation_in_the_place_of_one() -> None:
    hand = Hand(PARAMS)
    doubled = hand.call(aten.mul.Tensor, hand.input("x", 4), 2.0)

    def halve(_: Editor) -> None:
        doubled.target = aten.div.Tensor

    refused(hand.program([doubled]), halve, "div.Tensor(x, 2.0) instead of mul.Tensor(x")


def _draws() -> tuple[Program, fx.Node, fx.Node]:
    hand = Hand(PARAMS)
    x = hand.input("x", 4)
    one, two = (hand.call(aten.bernoulli.default, x) for _ in range(2))
    return hand.program([one, two]), one, two


def test_random_numbers_drawn_in_another_order() -> None:
    program, one, two = _draws()
    refused(program, lambda edit: edit.move_before(two, one), "other random or impure", two.name)


def test_random_numbers_drawn_once() -> None:
    program, one, two = _draws()
    refused(program, lambda edit: edit.replace(two, one), "output 1 as", one.name)


def test_pass_that_replaces_operations_says_so() -> None:
    hand = Hand(PARAMS)
    x = hand.input("x", 4)
    y = hand.call(aten.relu.default, x)

    def smooth(edit: Editor) -> None:
        edit.replace(y, edit.call_before(y, aten.silu.default, (x,), Facts()))

    def undo(edit: Editor) -> None:
        (found,) = edit.program.calls(aten.silu.default)
        edit.replace(found, edit.call_before(found, aten.relu.default, (x,), Facts()))

    program = hand.program([y])
    run_passes(program, [Replacing(smooth)])
    refused(program, undo, "output 0 as relu(x) instead of silu(x)")


def test_copies_casts_and_views_of_the_same_size_are_what_they_copy() -> None:
    hand = Hand(PARAMS)
    x = hand.input("x", 4)
    same = hand.call(aten.view.default, hand.call(aten.clone.default, x), [4])
    same = hand.call(torch.ops.prims.convert_element_type.default, same, torch.float64)
    other = hand.call(torch.ops.prims.convert_element_type.default, x, torch.float32)
    program = hand.program([x, same, other])
    first, second, third = Meanings(program).last.outputs
    assert first is second and first is not third


@functools.cache
def _finished() -> list[Program]:
    """Forward and backward of every stage."""
    stages = (0, 1, 2, 3)
    pairs = [compile_all(mlp(layout_for(each, 2, 2)), each, passes_for(each)) for each in stages]
    return [program for pair in pairs for program in pair]


@settings(max_examples=300)
@given(st.data())
def test_no_two_values_of_one_shape_can_be_exchanged(data: st.DataObject) -> None:
    """Whatever reads a value that counts may not read another one of the same shape and dtype."""
    program = data.draw(st.sampled_from(_finished()))
    readers = [node for node in program.graph.nodes if node.op != "placeholder"]
    reader = data.draw(st.sampled_from(readers))
    old = data.draw(st.sampled_from(reader.all_input_nodes or readers[:1]))
    earlier = [node for node in program.graph.nodes if node < reader and node is not old]
    values = Meanings(program)
    alike = [
        each
        for each in earlier
        if _looks(each) == _looks(old) and values.value(each) is not values.value(old)
    ]
    if old not in reader.all_input_nodes or not alike:
        return
    new = data.draw(st.sampled_from(alike))
    args = reader.args
    try:
        run_passes(program, [Edit(lambda edit: reader.replace_input_with(old, new))])
    except VerificationError:
        return
    finally:
        reader.args = args
    raise AssertionError(f"{reader.format_node()} may read {new} instead of {old}")


def _looks(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
