"""This rank's part of a full value."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.ir.spec import rows_of
from zerofx.runtime.collectives import as_bytes
from zerofx.runtime.domain import Domain
from zerofx.runtime.params import ParamState, as_dtensor


def cut(value: Tensor, state: ParamState) -> Tensor:
    """This rank's part, as a `DTensor`, of a full value that lies like a parameter.

    Args:
        value: global shape of the parameter, any dtype, the same on every rank.
        state: the parameter.
    """
    mine = own_rows(value, state.domain).clone(memory_format=torch.contiguous_format)
    return as_dtensor(mine, value.shape, state.domain)


def own_rows(full: Tensor, domain: Domain) -> Tensor:
    """The rows of `full` that this rank owns: a view; all of them without sharding."""
    if not domain.layout.sharded:
        return full.detach()
    start, stop = row_range(full.shape[0], domain)
    return full.detach()[start:stop]


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape and dtype are the same, NaN and signs of zeros included."""
    return torch.equal(as_bytes(one.detach()), as_bytes(other.detach()))


def row_range(num_rows: int, domain: Domain) -> tuple[int, int]:
    """First and past-the-last row that this rank owns of `num_rows`."""
    return rows_of(num_rows, domain.layout.num_shards, domain.shard_rank)
