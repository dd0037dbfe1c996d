"""A gradient that overflows on one rank does so on all.

`torch.amp.GradScaler` skips a step if it finds a value that is not finite. It finds what any rank
finds if the optimizer has a sharded parameter (`find_overflow_of_all`); an optimizer of replicated
ones alone would step beside one that skips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from zerofx.runtime.parameter import local_tensor


def mixed_gradients(params: Iterable[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Local gradients of replicated and of sharded parameters; plain tensors are left out."""
    whole: list[Tensor] = []
    parts: list[Tensor] = []
    for param in params:
        if isinstance(param.grad, DTensor):
            sharded = any(isinstance(each, Shard) for each in param.grad.placements)
            (parts if sharded else whole).append(local_tensor(param.grad))
    return whole, parts


def share_overflow(
    whole: list[Tensor],
    parts: list[Tensor],
    group: dist.ProcessGroup | None,
    wait: Callable[[Any], object],
) -> None:
    """Make the first value of some gradients infinite if any rank holds one that is not finite.

    Nothing is read back to the host, and finite gradients stay as they are.

    Args:
        whole: gradients that are to tell, such as those that all ranks hold alike.
        parts: of this rank, which are looked at.
        group: of ranks that hear of each other.
        wait: for a collective.
    """
    overflow = ~torch.stack([part.isfinite().all() for part in parts]).all()
    flag = overflow.to(torch.int32)
    wait(dist.all_reduce(flag, dist.ReduceOp.MAX, group=group, async_op=True))
    for grad in whole:
        first = grad.view(-1)[:1]
        first.copy_(torch.where(flag > 0, torch.inf, first))
