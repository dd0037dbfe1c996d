"""Dynamo's graph while it is divided: what each node was as a whole, and what it is here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.errors import UnsupportedError
from zerofx.ir.facts import module_path
from zerofx.sequence.cuts import Cut, Place
from zerofx.sequence.operations import call
from zerofx.torch_private import (
    FakeMode,
    all_positions,
    concrete_copy,
    has_unknown_size,
    map_tensors,
    memory_of,
    own_positions,
    tensors_in,
)

Result = tuple[fx.Node, "Cut | None"]
"""The node that has the result, and how that is cut."""


class Editor:
    """Edits one graph.

    Attributes:
        module: that has the graph.
        place: of this rank.
        mode: of fake values.
        cuts: how values are cut, by node; of tuples each member may be cut otherwise.
        values: what the divided program computes, on fake tensors.
        here: the node at hand.
        wholes: operations that are given whole values: names of nodes and paths of modules.
    """

    def __init__(self, module: fx.GraphModule, place: Place, mode: FakeMode) -> None:
        self.module = module
        self.graph = module.graph
        self.place = place
        self.mode = mode
        self.cuts: dict[fx.Node, Any] = {}
        self.values: dict[fx.Node, Any] = {}
        self._gathers: dict[fx.Node, fx.Node] = {}
        self.wholes: dict[tuple[str, str], None] = {}
        self.here = next(node for node in self.graph.nodes if node.op != "placeholder")
        self._slices: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self._examples = {node: node.meta.get("example_value") for node in self.graph.nodes}
        self._seen: dict[fx.Node, Any] = {}
        self._made: set[fx.Node] = set()
        self._whole_memories: dict[fx.Node, set[int]] = {}

    def cut(self, node: Any) -> Cut | None:
        """How a tensor is cut; `None`: it is whole."""
        return self.cuts.get(node)

    def example(self, node: fx.Node) -> Any:
        """What Dynamo saw at a node."""
        return self._examples.get(node)

    def alike(self, node: fx.Node) -> set[fx.Node]:
        """Nodes up to the one at hand that share memory with a node in the program of wholes."""
        theirs = self._memories_as_whole(node)
        return {each for each in self._before() if theirs & self._memories_as_whole(each)}

    def _before(self) -> Iterator[fx.Node]:
        """Nodes up to the one at hand."""
        return itertools.takewhile(lambda each: each is not self.here, self.graph.nodes)

    def _memories_as_whole(self, node: fx.Node) -> set[int]:
        if node not in self._whole_memories:
            self._whole_memories[node] = _memories(self._examples.get(node))
        return self._whole_memories[node]

    def apart(self, node: fx.Node) -> list[fx.Node]:
        """What would see a write to a node in one of the programs only, and is read later.

        It shares memory with the node in the program of wholes and not here, or the reverse.
        """
        memories = {each: self._memories_as_whole(each) for each in self._before()}
        ours, alike = _memories(self.values.get(node)), self.alike(node) - self._made
        is_copy = node not in self.cuts and not alike.isdisjoint(self.cuts)
        found: list[fx.Node] = []
        for each, its in memories.items():
            if each is node or each in self._made or not its:
                continue
            shares = bool(ours & _memories(self.values.get(each)))
            if each in alike and (each in self.cuts) != (node in self.cuts):
                shares = False
            elif each in alike and node not in self.cuts:
                shares = not is_copy
            by_caller = each.op in ("placeholder", "get_attr")
            later = any(user is not self.here and user not in memories for user in each.users)
            if shares != (each in alike) and (later or by_caller):
                found.append(each)
        return found

    def whole(self, node: fx.Node) -> Any:
        """A fake value of a node as Dynamo saw it, to look at; operations are run on new ones."""
        if node not in self._seen:
            found = self._new_whole(node)
            if self._examples.get(node) is None:
                return found  # what it is depends on the program so far
            self._seen[node] = found
        return self._seen[node]

    def _new_whole(self, node: fx.Node) -> Any:
        found = self._examples.get(node)
        if found is None and node.op == "get_attr":
            found = getattr(self.module, str(node.target), None)
        if found is None and node not in self.cuts:
            return map_tensors(torch.empty_like, self.value(node))
        if has_unknown_size(found):
            raise self.refusal(node, "has as many elements as other values say")
        return concrete_copy(found, self.mode)

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return tuple(self.whole(node).shape)

    def value(self, node: fx.Node) -> Any:
        """What the divided program has at a node."""
        if node not in self.values:
            if self._examples.get(node) is None and node.op.startswith("call"):
                self.run(node)
            else:
                self.values[node] = self._new_whole(node)
        return self.values[node]

    def operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that an operation takes, in order; one may come twice."""
        found: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), found.append)
        return [each for each in found if isinstance(self.whole(each), Tensor)]

    def set_operands(self, node: fx.Node, operands: Sequence[fx.Node]) -> None:
        """Give an operation other tensors, in the same order."""
        places, new = self.operands(node), iter(operands)
        arguments = fx.map_arg(
            (node.args, node.kwargs), lambda each: next(new) if each in places else each
        )
        node.args, node.kwargs = arguments

    def concrete(self, node: fx.Node, instead: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
        """Arguments of a node as whole values, some of them replaced."""
        return fx.map_arg(
            (node.args, node.kwargs),
            lambda each: instead[each] if each in instead else self._new_whole(each),
        )

    def aligned(self, node: fx.Node, cut: Cut | None, size: int) -> fx.Node:
        """A value as it meets others that are cut.

        Args:
            node: the value.
            cut: how it would have to be cut; `None`: it does not have their dimension.
            size: of their dimension, as a whole.
        """
        shape = self.shape(node)
        if cut is None or cut.dim >= len(shape) or shape[cut.dim] != size:
            return self.gathered(node)  # it is broadcast, or the empty one of `cat`
        return node if self.cut(node) == cut else self.sliced(self.gathered(node), cut)

    def gathered(self, node: fx.Node) -> fx.Node:
        """The whole value of a node that may be cut.

        Raises:
            UnsupportedError: it is a tuple.
        """
        cut = self.cuts.get(node)
        if cut is None:
            return node
        if not isinstance(cut, Cut) or not isinstance(self.values[node], Tensor):
            raise self.refusal(node, "hands a tuple of parts to an operation that needs it whole")
        self.wholes[self.here.name, module_path(self.here)] = None
        if node not in self._gathers:
            args = (node, cut.dim, cut.outer, self.place.group)
            self._gathers[node] = self.before(all_positions, args, self.whole(node))
        return self._gathers[node]

    def sliced(self, node: fx.Node, cut: Cut) -> fx.Node:
        """This rank's part of a whole value."""
        key = node, cut
        if key not in self._slices:
            args = (node, cut.dim, cut.outer, self.place.rank, self.place.size)
            made = self.before(own_positions, args, self._examples.get(node))
            self._slices[key] = made
            self.cuts[made] = cut
        return self._slices[key]

    def forget(self) -> None:
        """Something is written to: what was gathered or cut before may be out of date."""
        self._gathers.clear()
        self._slices.clear()

    def before(
        self, target: Callable[..., Any], args: tuple[Any, ...], whole: Any = None
    ) -> fx.Node:
        """A call in front of the node at hand; `whole`: its value if nothing were cut."""
        with self.graph.inserting_before(self.here):
            made = self.graph.call_function(target, args)
        self._made.add(made)
        made.meta = {key: at for key, at in self.here.meta.items() if key == "nn_module_stack"}
        value = self.run(made)
        self._examples[made] = value if whole is None else whole
        made.meta["example_value"] = value
        return made

    def after(
        self, node: fx.Node, target: Callable[..., Any], args: Callable[[fx.Node], tuple[Any, ...]]
    ) -> fx.Node:
        """A call behind a node, whose readers read this call instead."""
        self.run(node)
        with self.graph.inserting_after(node):
            made = self.graph.call_function(target, args(node))
        node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
        made.meta = dict(node.meta)
        self._examples[made] = self._examples.get(node)
        return made

    def replace(
        self, node: fx.Node, target: Callable[..., Any] | str, args: tuple[Any, ...]
    ) -> fx.Node:
        """Another operation in the place of a node: a function, or the name of a method."""
        with self.graph.inserting_before(node):
            if isinstance(target, str):
                made = self.graph.call_method(target, args)
            else:
                made = self.graph.call_function(target, args)
        made.meta = dict(node.meta)
        self._examples[made] = self._examples.get(node)
        node.replace_all_uses_with(made)
        self.graph.erase_node(node)
        return made

    def run(self, node: fx.Node) -> Any:
        """Compute a node of the divided program on fake values."""
        arguments = fx.map_arg((node.args, node.kwargs), self.value)
        with self.mode, torch.no_grad():
            self.values[node] = call(node, *arguments)
        return self.values[node]

    def unlike(self, node: fx.Node, cut: Cut | None) -> str:
        """How what a node computes is not what a rule says; empty if it is."""
        for value, whole in zip(
            tensors_in(self.run(node)), tensors_in(self.whole(node)), strict=True
        ):
            shape = tuple(whole.shape)
            want = shape if cut is None else cut.local(shape, self.place.size)
            if tuple(value.shape) != want or value.dtype != whole.dtype:
                return f"computes {tuple(value.shape)}, not {want}"
        return ""

    def fits(self, node: fx.Node, cut: Cut | None) -> bool:
        """Whether an operation, as it is written, computes from parts what a rule says."""
        try:
            return not self.unlike(node, cut)
        except (RuntimeError, IndexError, ValueError):
            return False
        finally:
            self.values.pop(node, None)

    def refusal(self, node: fx.Node, what: str, remedy: str = "") -> UnsupportedError:
        """An error that names a node and its module."""
        path = module_path(node)
        return UnsupportedError(
            f"sequence_parallel: {node.name}{f' of {path}' if path else ''} {what}",
            remedy or "write it otherwise, or train this model without sequence_parallel",
        )


def _memories(values: Any) -> set[int]:
    """Names of the storages in a nest."""
    return {key for each in tensors_in(values) if (key := memory_of(each)) is not None}
