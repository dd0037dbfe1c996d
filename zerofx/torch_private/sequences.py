"""Collectives between ranks that hold parts of one sequence, each with its adjoint as gradient.

A dimension of a value is `outer` × positions × `inner`, and a rank holds equally many neighbouring
positions of it. `group` is the name of a process group. Only first gradients are defined.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.autograd import Function

from zerofx.torch_private.conjugates import summed


def own_positions(x: Tensor, dim: int, outer: int, rank: int, size: int) -> Tensor:
    """This rank's part of a whole value; its gradient is zero elsewhere."""
    parts = x.unflatten(dim, (outer, size, -1)).select(dim + 1, rank)
    return parts.flatten(dim, dim + 1).contiguous()


def all_positions(x: Tensor, dim: int, outer: int, group: str) -> Tensor:
    """The whole value of parts; gradients of all ranks are summed, and each keeps its part."""
    apart = x.unflatten(dim, (outer, -1))
    return _Gathered.apply(apart, dim + 1, group).flatten(dim, dim + 1)


def exchanged(x: Tensor, split: int, join: int, group: str, size: int) -> Tensor:
    """Parts of dimension `join`, whole in `split`, become whole there and parts of `split`."""
    return _Exchanged.apply(x, split, join, group, size)


def total(x: Tensor, group: str) -> Tensor:
    """The sum over ranks, as is that of gradients."""
    return _Total.apply(x, group)


def of_first(x: Tensor, group: Any, size: int) -> Tensor:
    """What the first rank of the group has; without a gradient."""
    everyone = funcol.wait_tensor(funcol.all_gather_tensor(x.detach().unsqueeze(0), 0, group))
    return everyone.view(size, *x.shape)[0]


class _Gathered(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Any) -> Tensor:
        ctx.place = dim, group
        return funcol.wait_tensor(funcol.all_gather_tensor(x.contiguous(), dim, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        dim, group = ctx.place
        part = funcol.reduce_scatter_tensor(grad.contiguous(), "sum", dim, group)
        return funcol.wait_tensor(part), None, None


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, join: int, group: str, size: int) -> Tensor:
        ctx.place = join, split, group, size
        return _exchange(x, split, join, group, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore
        return _exchange(grad, *ctx.place), None, None, None, None


class _Total(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return summed(grad, ctx.group), None


def _exchange(x: Tensor, split: int, join: int, group: Any, size: int) -> Tensor:
    sent = torch.stack(x.unflatten(split, (size, -1)).unbind(split))
    came = funcol.wait_tensor(funcol.all_to_all_single(sent, None, None, group))
    return torch.cat(came.unbind(), join)
