"""Where the bytes of shards lie."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.ir.spec import ParamSpec


def allocate(spec: ParamSpec, rank: int, like: Tensor) -> tuple[Tensor | None, Tensor]:
    """Buffer, and the shard: a view of it if it can be; replicated parameters have no buffer."""
    if not spec.layout.sharded:
        return None, torch.empty(spec.shape, dtype=like.dtype, device=like.device)
    chunk, shape = spec.chunk_rows * spec.row_numel, spec.shard_shape(rank)
    if spec.layout.resident and spec.cast is not None:
        # As long as any, so that a shard of no rows has an address of its own too.
        master = like.new_zeros(chunk).narrow(0, 0, shape.numel()).view(shape)
        return like.new_zeros(spec.padded_numel, dtype=spec.cast), master
    buffer = like.new_zeros(spec.padded_numel if spec.layout.resident else chunk)
    start = rank * chunk if spec.layout.resident else 0
    return buffer, buffer.narrow(0, start, shape.numel()).view(shape)


def padded_chunk(shard: Tensor, out: Tensor, rank: int, numel: int) -> Tensor:
    """`shard` flattened, followed by padding up to `numel` elements, in the dtype of `out`.

    If it must be copied, it is written to where rank `rank`'s chunk belongs in `out`.
    """
    flat = shard.detach().reshape(-1)
    if flat.numel() == numel and flat.dtype is out.dtype:
        return flat
    own = out.narrow(0, rank * numel, numel)
    own[: flat.numel()].copy_(flat)
    own[flat.numel() :].zero_()
    return own


def row_numel(size: Sequence[int]) -> int:
    """Elements of one row of a value of this shape."""
    return math.prod(size[1:])


def row_splits(grad: Tensor, num_ranks: int) -> list[int]:
    """Elements of `grad` that each rank owns."""
    row, chunk = row_numel(grad.shape), -(-grad.shape[0] // num_ranks)
    edges = [min(i * chunk, grad.shape[0]) for i in range(num_ranks + 1)]
    return [(stop - start) * row for start, stop in itertools.pairwise(edges)]
