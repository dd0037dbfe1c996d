"""How long a kernel takes: a roofline, or times from a profile. Symbolic sizes count as hints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
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

    def seconds(self, node: fx.Node) -> float:
        """Time of a node that computes."""
        if node.name in self.profile:
            return self.profile[node.name]
        return max(num_flops(node) / self.flops, moved_bytes(node) / self.bytes_per_second)


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
        profile = self._roofline.profile
        if node.name in profile:
            return profile[node.name]
        read = [arg for arg in node.all_input_nodes if arg not in self._inside]
        moved = sum(value_bytes(arg.meta.get("val")) for arg in read)
        if node not in self._inside:
            moved += value_bytes(node.meta.get("val"))
        memory = moved / self._roofline.bytes_per_second
        return max(num_flops(node) / self._roofline.flops, memory)


def num_flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; else 0."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    given: Any = fx.map_arg((node.args, node.kwargs), lambda arg: _static(arg.meta.get("val")))
    return int(count(*given[0], **given[1], out_val=_static(node.meta.get("val"))))


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the inputs and outputs of a node."""
    read = sum(value_bytes(arg.meta.get("val")) for arg in node.all_input_nodes)
    return read + value_bytes(node.meta.get("val"))


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
