"""Collectives inside a model, each with the one that its gradient takes (Megatron-LM, §3).

A value is *whole* where all ranks of a group hold it alike. `group` is the name of a process group:
modules that hold a name can be copied and pickled. Only first gradients are defined.
"""

from __future__ import annotations

from typing import Any

import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd import Function


def name_of(group: Any) -> str:
    """The name of a process group."""
    return group.group_name


def for_parts(x: Tensor, group: str) -> Tensor:
    """A whole value, of which each rank computes something else: gradients are summed."""
    return _ForParts.apply(x, group)


def sum_of_parts(x: Tensor, group: str) -> Tensor:
    """The sum over ranks, which is whole, as is its gradient."""
    return _SumOfParts.apply(x, group)


def joined(x: Tensor, group: str, rank: int, size: int) -> Tensor:
    """Equal parts of the last dimension as a whole value; its gradient is whole.

    Args:
        x: this rank's part.
        group: by name.
        rank: in the group; Dynamo cannot ask for it.
        size: of the group.
    """
    return _Joined.apply(x, group, rank, size)


def own_part(x: Tensor, group: str, rank: int, size: int) -> Tensor:
    """As `joined` the other way: this rank's part of a whole value; gradients are joined."""
    return _OwnPart.apply(x, group, rank, size)


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum over ranks; it has no gradient of its own."""
    return funcol.wait_tensor(funcol.all_reduce(x.contiguous(), "sum", group))


def _join(x: Tensor, group: Any) -> Tensor:
    return funcol.wait_tensor(funcol.all_gather_tensor(x.contiguous(), x.ndim - 1, group))


def _part(x: Tensor, rank: int, size: int) -> Tensor:
    return x.chunk(size, -1)[rank].contiguous()


class _ForParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return summed(grad, ctx.group), None


class _SumOfParts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return grad, None


class _Joined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, size: int) -> Tensor:
        ctx.place = rank, size
        return _join(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return _part(grad, *ctx.place), None, None, None


class _OwnPart(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str, rank: int, size: int) -> Tensor:
        ctx.group = group
        return _part(x, rank, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore
        return _join(grad, ctx.group), None, None, None
