"""What a program computes, however it communicates: value numbers of all that leaves it.

Two values have one number if the same operations made them from the same inputs (global value
numbering; Alpern, Wegman and Zadeck 1988). The full value of a parameter is a function of its
shard, whenever it is gathered; what is left of a gradient is the mean of it, whatever travels along
and as what. A pass that keeps these numbers keeps what the program means (translation validation;
Necula 2000).
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.view import cast_to, identity_source, is_impure

_ADD = torch.ops.aten.add.Tensor
_CLONE = torch.ops.aten.clone.default


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A value number: an operation, and the values and constants that it was given.

    Attributes:
        op: what FX calls; or "input", "constant", "full", "mean", "cast", and "once", for what is
            drawn at random, or done, and is another value the next time.
        given: values, constants, and tuples of them.
    """

    op: Any
    given: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What leaves a program.

    Attributes:
        outputs: of each output its value, or the constant that it is.
        effects: random and impure operations, in execution order.
    """

    outputs: tuple[Any, ...]
    effects: tuple[Value, ...]


class _Seen(NamedTuple):
    """A node's value, and the call for which it was found."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Value


class Meanings:
    """What successive forms of one program mean; equal values have one number in all of them."""

    def __init__(self, program: Program) -> None:
        self._known: dict[tuple[Any, ...], Value] = {}
        self._inputs: Mapping[str, Value] = {}
        self._begin(program)

    def of_part(self, program: Program, inputs: Mapping[str, Value]) -> Meanings:
        """What another program means, in the same numbers.

        Args:
            program: a part of this one.
            inputs: values of its inputs, by their names; others are inputs of this one, too.
        """
        part = copy.copy(self)
        part._inputs = inputs
        part._begin(program)
        return part

    def renewed(self, program: Program) -> tuple[Meaning, Meaning]:
        """What the program meant the last time, and what it means now."""
        before, self.last = self.last, self._meaning(program)
        return before, self.last

    def value(self, node: fx.Node) -> Value:
        """The value of a node of the last form."""
        return self._seen[node].value

    def _begin(self, program: Program) -> None:
        self._seen: dict[fx.Node, _Seen] = {}
        self.last = self._meaning(program)

    def _meaning(self, program: Program) -> Meaning:
        """Number values, in linear time; those of nodes that stayed as they were stay."""
        effects: list[Value] = []
        changed: set[fx.Node] = set()
        for node in program.graph.nodes:
            seen = self._seen.get(node)
            call = (node.target, node.args, node.kwargs)
            same = seen is not None and all(map(operator.is_, seen, call))
            if seen is None or not same or not changed.isdisjoint(node.all_input_nodes):
                value = self._number(program, node)
                if seen is not None and seen.value is not value:
                    changed.add(node)
                seen = self._seen[node] = _Seen(*call, value)
            if seen.value.op == "once":
                effects.append(seen.value)
        outputs = tuple(self._given(each) for each in program.outputs)
        return Meaning(outputs, tuple(effects))

    def _number(self, program: Program, node: fx.Node) -> Value:
        if node.op == "placeholder":
            known = self._inputs.get(node.name)
            return known or self._value("input", node.name, facts(node).param)
        if node.op == "get_attr":
            return self._value("constant", node.target)
        if node.target in (ops.UNSHARD, ops.UNSHARD_WAIT):
            return self._full(program, node)
        if node.target in (ops.REDUCE_GRAD, ops.REDUCE_WAIT):
            return self._mean(node)
        source = node.all_input_nodes[0] if node.target is _CLONE else identity_source(node)
        if source is not node:
            return self.value(source)
        if (dtype := cast_to(node)) is not None:
            return self._cast(node.all_input_nodes[0], dtype)
        given = tuple([self._given(each) for each in node.args])
        if node.kwargs:
            given += (self._given(node.kwargs),)
        if node.target is _ADD and len(given) == 2:
            return self._sum(*given)
        value = self._value(node.target, *given)
        return self._value("once", value, node.name) if _is_once(node) else value

    def _full(self, program: Program, node: fx.Node) -> Value:
        """The full value of a parameter; of one that every rank holds, its shard."""
        shard, size = node.args[:2] if node.target is ops.UNSHARD else node.args[1:3]
        assert isinstance(shard, fx.Node)
        value, spec = self.value(shard), program.spec(node)
        if spec is None or spec.layout.sharded:
            value = self._value("full", value, self._given(size))
        return self._cast(shard, ops.full_dtype(node), value)

    def _mean(self, node: fx.Node) -> Value:
        """What this rank owns of the mean of a gradient; its dtype is of the rule `own_dtype`."""
        shard = node.args[1]
        start = node if node.target is ops.REDUCE_GRAD else ops.started_by(node)
        moved = [shard] if start is node else ops.members(start)
        grad = dict(zip(moved, ops.gradients(start), strict=True)).get(shard)
        return self._value("mean", self._given(grad), self._given(shard))

    def _cast(
        self, source: fx.Node, dtype: torch.dtype | None, value: Value | None = None
    ) -> Value:
        value = value or self.value(source)
        same = dtype is None or dtype is source.meta["val"].dtype
        return value if same else self._value("cast", value, dtype)

    def _sum(self, left: Any, right: Any) -> Value:
        """A sum; that of means of one parameter's gradients is the mean of their sum."""
        means = [each for each in (left, right) if isinstance(each, Value) and each.op == "mean"]
        if len(means) == 2 and left.given[1] is right.given[1]:
            return self._value("mean", self._sum(left.given[0], right.given[0]), left.given[1])
        return self._value(_ADD, left, right)

    def _value(self, op: Any, *given: Any) -> Value:
        found = self._known.get((op, given))
        if found is None:
            found = self._known[op, given] = Value(op, given)
        return found

    def _given(self, arg: Any) -> Any:
        """An argument, with values for nodes; constants that only compare as equal differ."""
        if isinstance(arg, fx.Node):
            return self.value(arg)
        kind = cast(type[object], type(arg))
        if kind in (int, str, type(None)):
            return arg
        if isinstance(arg, (list, tuple)):
            return tuple([self._given(each) for each in cast("list[Any]", arg)])
        if isinstance(arg, Mapping):
            items = cast("Mapping[str, Any]", arg).items()
            return tuple([(key, self._given(each)) for key, each in items])
        if isinstance(arg, slice):
            part = cast("slice[Any, Any, Any]", arg)
            return "slice", *map(self._given, (part.start, part.stop, part.step))
        return kind, str(arg)


def _is_once(node: fx.Node) -> bool:
    """Whether to do it again is another thing; collectives of the model's return the same again."""
    collective = getattr(node.target, "namespace", "") == "_c10d_functional"
    return ops.computes(node) and not collective and is_impure(node)
