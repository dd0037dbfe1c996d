"""How long a kernel takes: a roofline, or times from a profile."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry


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
        """Time of a node that computes; symbolic sizes count as their hints."""
        if node.name in self.profile:
            return self.profile[node.name]
        return max(num_flops(node) / self.flops, moved_bytes(node) / self.bytes_per_second)


def num_flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution or attention; else 0."""
    count = flop_registry.get(getattr(node.target, "overloadpacket", None))
    if count is None:
        return 0
    args: Any = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta.get("val"))
    return int(count(*args[0], **args[1], out_val=node.meta.get("val")))


def moved_bytes(node: fx.Node) -> int:
    """Bytes of the inputs and outputs of a node."""
    read = sum(value_bytes(arg.meta.get("val")) for arg in node.all_input_nodes)
    return read + value_bytes(node.meta.get("val"))


def value_bytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors in a sequence."""
    if isinstance(value, Tensor):
        return int(value.numel()) * value.dtype.itemsize
    if isinstance(value, (tuple, list)):
        return sum(value_bytes(each) for each in cast("list[Any]", value))
    return 0
