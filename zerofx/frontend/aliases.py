"""Outputs that share memory: graphs return what they are views of, and views are made outside.

AOTAutograd refuses them where an input is a `DTensor`, as parameters are under `grad_dtype`. Made
outside, by the operations of the user's own code, they share memory as they should, and writes
reach all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from zerofx.frontend.joint import copy_module
from zerofx.torch_private import memory_of, tensors_in

Regenerate = Callable[..., Sequence[Any]]
"""Makes a graph's outputs of what is returned in their place."""


def views_outside(module: fx.GraphModule) -> tuple[fx.GraphModule, Regenerate | None]:
    """Split off the views through which a graph returns one value twice or more.

    Args:
        module: Dynamo's graph, with example values.

    Returns:
        What is left, and what makes the outputs of its outputs; the graph itself, and `None`, if it
        returns no two views of a value that it made.
    """
    views = _returned_views(module.graph)
    if not views:
        return module, None
    outputs: Any = module.graph.output_node().args[0]
    read = {each for node in views for each in node.all_input_nodes}
    read.update(each for each in outputs if isinstance(each, fx.Node))
    left = [node for node in module.graph.nodes if node in read - views]
    tail = fx.Graph()
    values = {node: tail.placeholder(node.name) for node in left}
    for node in module.graph.nodes:
        if node in views:
            values[node] = tail.node_copy(node, values.__getitem__)
    tail.output(fx.map_arg(outputs, values.__getitem__))
    return _returning(module, left, views), fx.GraphModule(module, tail)


def _returning(
    module: fx.GraphModule, left: Sequence[fx.Node], views: set[fx.Node]
) -> fx.GraphModule:
    """A copy that returns other nodes, without the views that nothing in it reads."""
    made = copy_module(module)
    nodes = {node.name: node for node in made.graph.nodes}
    made.graph.output_node().args = (tuple(nodes[node.name] for node in left),)
    for node in reversed([nodes[node.name] for node in module.graph.nodes if node in views]):
        if not node.users:
            made.graph.erase_node(node)
    made.recompile()
    return made


def _returned_views(graph: fx.Graph) -> set[fx.Node]:
    """Nodes between values that the graph made and two or more of its outputs."""
    keys = {node: _storages(node) for node in graph.nodes}
    maker: dict[int, fx.Node] = {}
    for node, found in keys.items():
        for key in found:
            maker.setdefault(key, node)
    outputs: Any = graph.output_node().args[0]
    returned: dict[int, set[fx.Node]] = {}
    for node in outputs:
        if isinstance(node, fx.Node) and len(keys[node]) == 1:
            returned.setdefault(next(iter(keys[node])), set()).add(node)
    views: set[fx.Node] = set()
    for key, nodes in returned.items():
        if len(nodes) > 1 and maker[key].op not in ("placeholder", "get_attr"):
            between = {each for node in nodes for each in _path(node, key, keys)} - {maker[key]}
            if all(keys[node] == {key} and _is_pure(node) for node in between):
                views |= between
    return views


def _path(node: fx.Node, key: int, keys: dict[fx.Node, set[int]]) -> Iterator[fx.Node]:
    """The node, and whatever it is a view of."""
    yield node
    for source in node.all_input_nodes:
        if key in keys[source]:
            yield from _path(source, key, keys)


def _storages(node: fx.Node) -> set[int]:
    found = map(memory_of, tensors_in(node.meta.get("example_value")))
    return {key for key in found if key is not None}


def _is_pure(node: fx.Node) -> bool:
    """Whether it may run again elsewhere: it writes nothing, and autograd sees it there as here."""
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.startswith("__")
    augmented = name.startswith("i") and hasattr(operator, name) and hasattr(operator, name[1:])
    if in_place or augmented or node.op not in ("call_function", "call_method"):
        return False
    return name == "detach" or _needs_grad(node) or not any(map(_needs_grad, node.all_input_nodes))


def _needs_grad(node: fx.Node) -> bool:
    return any(value.requires_grad for value in tensors_in(node.meta.get("example_value")))
