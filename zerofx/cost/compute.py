"""How long a kernel takes: a roofline, or times from a profile. Symbolic sizes count as hints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from zerofx.cost.fusion import values_inside_kernels
from zerofx.torch_private import size_hint


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A machine: a node takes its arithmetic or its memory traffic, whichever is longer.

    Attributes:
        flops: floating-point operations per second of matrix products.
        bytes_per_second: of memory.
        profile: measured seconds by node name; they win over the estimate.
    """

    flops: float = 50e9
    bytes_per_second: float = 10e9
    profile: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])

    def seconds(self, node: fx.Node, inside: Collection[fx.Node] = ()) -> float:
        """Time of a node that computes.

        Args:
            node: whose values are known.
            inside: nodes whose values stay inside a kernel, and are not written and read again.
        """
        if node.name in self.profile:
            return self.profile[node.name]
        memory = moved_bytes(node, inside) / self.bytes_per_second
        return max(num_flops(node) / self.flops, memory)


class Kernels:
    """A roofline of fused kernels: what stays inside one is not written and read again.

    Args:
        graph: of a program.
        roofline: of the machine.
        fused: whether kernels are fused, as Inductor does.
    """

    def __init__(self, graph: fx.Graph, roofline: Roofline, *, fused: bool) -> None:
        self._inside = values_inside_kernels(graph) if fused else set[fx.Node]()
        self._roofline = roofline

    def seconds(self, node: fx.Node) -> float:
        """Time of a node; inner values cost what they read from memory."""
        return self._roofline.seconds(node, self._inside)


def num_flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; else 0."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    given: Any = fx.map_arg((node.args, node.kwargs), lambda arg: _static(arg.meta.get("val")))
    return int(count(*given[0], **given[1], out_val=_static(node.meta.get("val"))))


def moved_bytes(node: fx.Node, inside: Collection[fx.Node] = ()) -> int:
    """Bytes that a kernel reads and writes if it touches each of its values once.

    Values of nodes `inside` kernels are not counted.
    """
    touched = (each for each in (*node.all_input_nodes, node) if each not in inside)
    return sum(value_bytes(each.meta.get("val")) for each in touched)


def value_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in a sequence."""
    if isinstance(value, Tensor):
        return math.prod(map(size_hint, value.shape)) * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        return sum(value_bytes(each) for each in cast("list[Any]", value))
    return 0


def _static(value: Any) -> Any:
    """A tensor with its symbolic extents as numbers: formulas of them would guard on each."""
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape):
        return torch.empty([size_hint(n) for n in value.shape], dtype=value.dtype, device="meta")
    return value
