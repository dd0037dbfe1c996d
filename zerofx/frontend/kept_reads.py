"""What backward may not read again: inputs of a graph that are written to before it runs.

torch's partitioner saves inputs as they are, and computes again in backward what it can. An input
that the graph writes to has its new value then, and gradients are wrong without a word
(pytorch/pytorch#197039). A buffer that another graph or Python code writes to, as to a queue of
keys, is an error there; in one process `self.queue.clone()` makes it none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, fx

from zerofx.ir.view import alias_closure
from zerofx.torch_private import dynamo_input_of, inputs_written, must_save_tag

_CLONE = torch.ops.aten.clone.default
_COPY = torch.ops.aten.copy_.default


def keep_reads(graph: fx.Graph, buffers: Collection[int]) -> None:
    """Let backward have what forward read.

    Args:
        graph: of both.
        buffers: positions of a model's buffers among the inputs of Dynamo's graph.
    """
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for source in inputs_written(graph):
        aliases = alias_closure(source)
        if any(map(_is_backward, _readers(aliases))):
            aliases = [source, _copied(source, first)]
        for node in _readers(aliases):
            _save(node)
    states = _states(graph, buffers)
    if not states:
        return
    derived = _computed_from(states, graph)
    for node in _readers([alias for state in states for alias in alias_closure(state)]):
        if node in derived and _holds_numbers(node):
            _save(node)


@contextlib.contextmanager
def copies_kept(graph: fx.Graph, buffers: Collection[int]) -> Iterator[None]:
    """While Inductor's passes run: they take copies of inputs for nothing.

    Args:
        graph: of forward and backward.
        buffers: positions of a model's buffers among the inputs of Dynamo's graph.
    """
    aliases = [alias for state in _states(graph, buffers) for alias in alias_closure(state)]
    copies = [node for node in _readers(aliases) if node.target is _CLONE and not node.kwargs]
    for node in copies:
        node.target = torch.ops.aten.alias_copy.default
    yield
    for node in copies:
        node.target = _CLONE


def _states(graph: fx.Graph, buffers: Collection[int]) -> list[fx.Node]:
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if dynamo_input_of(node)[0] in buffers]


def _readers(aliases: Collection[fx.Node]) -> list[fx.Node]:
    """Operations that read one of them and give a value of their own."""
    users = {user: None for alias in aliases for user in alias.users}
    return [node for node in users if node.op == "call_function" and node not in aliases]


def _copied(source: fx.Node, first: fx.Node) -> fx.Node:
    """A copy before the `first` operation that all read instead, but the write to `source`."""
    with source.graph.inserting_before(first):
        made = source.graph.call_function(_CLONE, (source,))
    made.meta["val"] = source.meta["val"].clone()
    for user in list(source.users):
        if user is not made and not (user.target is _COPY and user.args[0] is source):
            user.replace_input_with(source, made)
    return made


def _save(node: fx.Node) -> None:
    if "recompute" not in node.meta and not _is_backward(node) and node.target is not _COPY:
        node.meta["recompute"] = must_save_tag()


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _computed_from(sources: Iterable[fx.Node], graph: fx.Graph) -> set[fx.Node]:
    """`sources`, and nodes that read nothing else."""
    found = set(sources)
    for node in graph.nodes:
        read = node.all_input_nodes
        if node.op == "call_function" and read and all(each in found for each in read):
            found.add(node)
    return found


def _holds_numbers(node: fx.Node) -> bool:
    """Not so a mask, which is as large as what it is made of, and seldom written to."""
    value = node.meta.get("val")
    return node.target is _CLONE or (isinstance(value, Tensor) and value.is_floating_point())
