"""Which values a fusing compiler never writes to memory.

Inductor computes chains of pointwise operations inside the kernel of whoever reads them. Matrix
products, convolutions, attention and communication read from memory; so do kernels of another
compute segment.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from zerofx.ir.ops import PROGRAM_OPS
from zerofx.ir.view import aliased_inputs

_POINTWISE = frozenset(
    str(op)
    for op in (
        "aten.full",
        "aten.full_like",
        "aten.arange",
        "aten.clone",
        "aten.embedding",
        "aten.gather",
        "aten.index",
        "aten.cat",
        "aten.constant_pad_nd",
        "aten.scalar_tensor",
        "aten.slice_scatter",
        "aten.select_scatter",
        "aten.zeros_like",
        "aten.new_zeros",
        "aten.copy",
        "prims.convert_element_type",
        "prims.iota",
        "prims.inductor_random",
    )
)
_REDUCTIONS = frozenset(
    ("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.var", "aten.var_mean", "aten.argmax")
)


def values_inside_kernels(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose value no kernel, and nobody else, reads from memory."""
    segment: dict[fx.Node, int] = {}
    number = 0
    for node in graph.nodes:
        number += node.op == "call_function" and node.target in PROGRAM_OPS
        segment[node] = number
    inside: set[fx.Node] = set()
    joins: dict[fx.Node, bool] = {}  # whether kernels that compute what it reads compute it, too
    for node in reversed(list(graph.nodes)):
        fused = all(segment[user] == segment[node] and joins[user] for user in node.users)
        is_view = bool(aliased_inputs(node))
        is_pointwise = not is_view and _is_pointwise(node)
        joins[node] = fused if is_view else is_pointwise or _name(node) in _REDUCTIONS
        if fused and node.users and is_pointwise:
            inside.add(node)
    return inside


def _is_pointwise(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or _name(node) in _POINTWISE


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", ""))
