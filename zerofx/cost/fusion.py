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
    fused: dict[fx.Node, bool] = {}
    for node in reversed(list(graph.nodes)):
        # Whether all that is computed from it belongs to the kernels of its own segment.
        fused[node] = all(
            segment[user] == segment[node] and (fused[user] if _is_view(user) else _fuses(user))
            for user in node.users
        )
        if fused[node] and node.users and _is_pointwise(node):
            inside.add(node)
    return inside


def _fuses(user: fx.Node) -> bool:
    return _is_pointwise(user) or _name(user) in _REDUCTIONS


def _is_pointwise(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), Tensor):
        return False
    tags = getattr(node.target, "tags", ())
    return not _is_view(node) and (torch.Tag.pointwise in tags or _name(node) in _POINTWISE)


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_function" and bool(aliased_inputs(node))


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", ""))
