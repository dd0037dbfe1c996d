"""Eager kernels of the markers: they really communicate.

Compiled programs never call them; code outside of captured graphs stays correct through them, and
they are the oracle that programs are compared with. Importing this module registers them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.runtime.handles import domain_of
from zerofx.torch_private import shares_storage

_LIBRARY = torch.library.Library("zerofx", "IMPL")


def _unshard(
    shard: Tensor, size: Sequence[int], layout: int, dtype: torch.dtype | None = None
) -> Tensor:
    domain = domain_of(layout)
    with domain.session.explained():
        full = domain.unshard_wait(domain.unshard_start([shard], [size], [dtype]), 0, size)
    if domain.layout.resident:
        return full.detach()
    domain.free(full)
    # An op may not return its input, which a replicated parameter is.
    return full.clone() if shares_storage(full, shard) else full


def _reduce_grad(grad: Tensor, shard: Tensor, layout: int) -> Tensor:
    domain = domain_of(layout)
    with domain.session.explained():
        reduced = domain.reduce_wait(domain.reduce_start([grad], [shard]), 0, shard)
    return reduced.clone() if shares_storage(reduced, grad) else reduced


_LIBRARY.impl("unshard", _unshard, "CompositeExplicitAutograd")
_LIBRARY.impl("reduce_grad", _reduce_grad, "CompositeExplicitAutograd")
