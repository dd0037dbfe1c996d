"""Graphs inside Dynamo's graph: the functions that operators such as `checkpoint` are given.

What `torch.compiler.nested_compile_region` made is written out: zerofx cuts programs and compiles
equal pieces once as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import fx

from zerofx.frontend.joint import copy_module

_REGION: Any = torch.ops.higher_order.invoke_subgraph


def bodies_of(module: fx.GraphModule, node: fx.Node) -> Iterator[fx.GraphModule]:
    """Graphs that `node`, of `module`'s graph, is given to run."""
    for given in node.all_input_nodes:
        if (body := _graph_at(module, given)) is not None:
            yield body


def copy_with_bodies(module: fx.GraphModule) -> fx.GraphModule:
    """A copy to edit, and so of the graphs inside it."""
    made = copy_module(module)
    for node in made.graph.find_nodes(op="get_attr"):
        if (body := _graph_at(module, node)) is not None:
            setattr(made, str(node.target), copy_with_bodies(body))
    return made


def write_out_regions(module: fx.GraphModule) -> None:
    """Put the graphs of nested compile regions in the place of their calls, at any depth."""
    for node in module.graph.find_nodes(op="get_attr"):
        if (body := _graph_at(module, node)) is not None:
            write_out_regions(body)
    if calls := module.graph.find_nodes(op="call_function", target=_REGION):
        for call in calls:
            _write_out(module, call)
        module.recompile()


def _write_out(module: fx.GraphModule, call: fx.Node) -> None:
    region, _, *operands = cast(tuple[Any, ...], call.args)
    (body,) = bodies_of(module, call)
    inputs = body.graph.find_nodes(op="placeholder")
    values: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    with module.graph.inserting_before(call):
        for node in body.graph.find_nodes(op="get_attr"):
            name, inner = f"{call.name}_{node.target}", getattr(body, str(node.target))
            is_graph = isinstance(inner, fx.GraphModule)
            setattr(module, name, copy_with_bodies(inner) if is_graph else inner)
            values[node] = module.graph.get_attr(name)
        outputs = cast(tuple[Any, ...], module.graph.graph_copy(body.graph, values))
    for item in list(call.users):
        item.replace_all_uses_with(outputs[cast(int, item.args[1])])
        module.graph.erase_node(item)
    module.graph.erase_node(call)
    if not region.users:
        module.graph.erase_node(region)


def _graph_at(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph that `node` gets as an attribute of `module`, if it does."""
    found = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, fx.GraphModule) else None
