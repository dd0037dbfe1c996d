"""Cut a program at its communication nodes into compute segments.

A segment is a run of neighbouring compute nodes. Equal segments (same ops, shapes, strides) share
one compiled function, so that the number of compilations does not grow with a model's depth.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.ir.ops import PROGRAM_OPS
from zerofx.ir.view import is_getitem, positions
from zerofx.torch_private import lookup_seed_op, settled, symbols_of

_VIEWS = frozenset(
    (
        torch.ops.aten.t.default,
        torch.ops.aten.view.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    )
)


@dataclasses.dataclass(frozen=True)
class Segment:
    """A run of compute nodes.

    Attributes:
        inputs: nodes outside whose values it reads; symbols that it needs come first.
        outputs: its nodes whose values are read outside.
        graph: the nodes as a graph of their own; the output is a tuple.
        owner: holds the constants that `graph` reads.
        key: equal for segments that compute the same.
        only_views: nothing to compile.
    """

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    graph: fx.Graph
    owner: torch.nn.Module
    key: str
    only_views: bool


def split(graph: fx.Graph) -> list[fx.Node | Segment]:
    """Communication nodes and compute segments, in execution order.

    Placeholders and the output node are left out.
    """
    runs: list[fx.Node | list[fx.Node]] = []
    home: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target in PROGRAM_OPS or node.target is lookup_seed_op():
            runs.append(node)
        elif is_getitem(node) and node.all_input_nodes[0] in home:
            # The outputs of one kernel cross to other segments each alone, never in a tuple.
            home[node] = home[node.all_input_nodes[0]]
            home[node].append(node)
        else:
            if not runs or isinstance(runs[-1], fx.Node):
                runs.append([])
            run = runs[-1]
            assert isinstance(run, list)
            run.append(node)
            home[node] = run
    symbols = _symbol_sources(graph)
    place = positions(graph)
    inputs = [() if isinstance(run, fx.Node) else _read_by(run, symbols, place) for run in runs]
    # No node says that a later segment needs a symbol which this one computes.
    read = {node for each in inputs for node in each}
    return [
        run if isinstance(run, fx.Node) else _make_segment(graph, run, given, read)
        for run, given in zip(runs, inputs, strict=True)
    ]


def _read_by(
    nodes: list[fx.Node], symbols: dict[str, fx.Node], place: dict[fx.Node, int]
) -> tuple[fx.Node, ...]:
    """Symbols whose values are known by then come first; others follow from shapes."""
    inside = set(nodes)
    outer = {arg: None for node in nodes for arg in node.all_input_nodes if arg not in inside}
    read = sorted(outer, key=lambda node: place[node])
    needed = {
        symbols[symbol]: None
        for node in (*read, *nodes)
        for symbol in symbols_of(node.meta.get("val"))
        if symbol in symbols
    }
    leading = [source for source in needed if place[source] < place[nodes[0]]]
    return tuple(dict.fromkeys((*leading, *read)))


def _make_segment(
    graph: fx.Graph, nodes: list[fx.Node], inputs: tuple[fx.Node, ...], read: set[fx.Node]
) -> Segment:
    inside = set(nodes)
    outputs = tuple(
        node for node in nodes if node in read or any(user not in inside for user in node.users)
    )
    own, owner = _extract(nodes, inputs, outputs), graph.owning_module or torch.nn.Module()
    only_views = all(node.target in _VIEWS for node in nodes)
    return Segment(inputs, outputs, own, owner, _key(own, owner), only_views)


def _extract(
    nodes: list[fx.Node], inputs: tuple[fx.Node, ...], outputs: tuple[fx.Node, ...]
) -> fx.Graph:
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for index, node in enumerate(inputs):
        copies[node] = made.placeholder(f"in_{index}")
        copies[node].meta["val"] = settled(node.meta.get("val"))
    for node in nodes:
        copies[node] = made.node_copy(node, lambda arg: copies[arg])
    made.output(tuple(copies[node] for node in outputs))
    return made


def _key(graph: fx.Graph, owner: torch.nn.Module) -> str:
    """Text that is equal for segments of equal meaning: canonical names, full tensor metadata."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    lines: list[str] = []
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda arg: f"%{number[arg]}")
        target = "" if node.op == "placeholder" else _target_key(owner, node)
        lines.append(f"{node.op} {target} {args} {_value_key(node.meta.get('val'))}")
    return "\n".join(lines)


def _target_key(owner: torch.nn.Module, node: fx.Node) -> str:
    if node.op == "get_attr":
        # Constants and subgraphs of higher-order ops: shared only with themselves.
        return f"{node.target}@{id(getattr(owner, str(node.target), None))}"
    return str(node.target)


def _value_key(value: Any) -> str:
    if isinstance(value, Tensor):
        stride = tuple(value.stride()) if value.layout == torch.strided else None
        return f"{value.dtype}{tuple(value.shape)}{stride}{value.device}{value.requires_grad}"
    if isinstance(value, (tuple, list)):
        return ", ".join(_value_key(item) for item in value)
    return repr(value)


def _symbol_sources(graph: fx.Graph) -> dict[str, fx.Node]:
    """For each shape symbol, the first node whose value is that symbol."""
    found: dict[str, fx.Node] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            found.setdefault(str(value), node)
    return found
