"""What a standalone program communicates with: plain `torch.distributed`, one call after another.

Every `program.py` of a dump holds the text of this file. Nothing starts early here and nothing is
reused: these functions say what the nodes of a program mean, and run to show that it is so.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Layout:
    """`shards` neighbouring ranks own a part each; so do `replicas` such groups.

    Gradients travel and are averaged in `reduce_dtype`, by default each in its own.
    """

    def __init__(self, shards: int, replicas: int, reduce_dtype: torch.dtype | None) -> None:
        rows = [list(range(start, start + shards)) for start in range(0, shards * replicas, shards)]
        self.shards, self.reduce_dtype = shards, reduce_dtype
        self.place = dist.get_rank() % shards
        self.together = [dist.new_group(ranks) for ranks in rows][dist.get_rank() // shards]
        columns = [list(ranks) for ranks in zip(*rows, strict=True)]
        self.alike = [dist.new_group(ranks) for ranks in columns][self.place]


@functools.cache
def layout(shards: int, replicas: int, reduce_dtype: torch.dtype | None = None) -> Layout:
    """The ranks of a layout; all ranks must ask for it at the same point."""
    return Layout(shards, replicas, reduce_dtype)


def unshard_start(
    shards: Sequence[Tensor], sizes: Sequence[Sequence[int]], ranks: Layout
) -> list[Tensor]:
    """Full values: the rows of all ranks, one below the other."""
    fulls: list[Tensor] = []
    for shard, size in zip(shards, sizes, strict=True):
        padded = shard.new_zeros(-(-size[0] // ranks.shards), *size[1:])
        padded[: len(shard)] = shard
        parts = [torch.empty_like(padded) for _ in range(ranks.shards)]
        dist.all_gather(parts, padded, group=ranks.together)
        fulls.append(torch.cat(parts)[: size[0]])
    return fulls


def unshard(
    shard: Tensor, size: Sequence[int], ranks: Layout, dtype: torch.dtype | None = None
) -> Tensor:
    """The full value of one parameter; replicated ones are whole on every rank."""
    full = unshard_start([shard], [size], ranks)[0] if ranks.shards > 1 else shard.clone()
    return full.to(dtype or full.dtype)


def unshard_wait(
    pending: Sequence[Tensor], member: int, dtype: torch.dtype | None = None
) -> Tensor:
    """The full value of one member of a bucket; zerofx casts before it gathers."""
    return pending[member].to(dtype or pending[member].dtype)


def free(full: Tensor) -> None:
    """Nobody reads the value any more: whoever did would read NaN."""
    if full.is_floating_point():
        full.fill_(torch.nan)


def keep(full: Tensor) -> None:
    """The next backward may use the value; this file gathers it again."""


def reduce_start(grads: Sequence[Tensor], ranks: Layout) -> list[Tensor]:
    """Of each gradient's mean over all ranks, the rows that this rank owns."""
    means: list[Tensor] = []
    for grad in grads:
        mean = mean_over(grad.to(ranks.reduce_dtype or grad.dtype), ranks.together)
        means.append(mean_over(own_rows(mean, ranks), ranks.alike))
    return means


def reduce_grad(grad: Tensor, ranks: Layout, dtype: torch.dtype) -> Tensor:
    """This rank's part of the mean of one gradient, in the parameter's dtype."""
    return reduce_start([grad], ranks)[0].to(dtype)


def reduce_wait(pending: Sequence[Tensor], member: int, dtype: torch.dtype) -> Tensor:
    """This rank's part of one member's mean gradient, in `dtype`."""
    return pending[member].to(dtype)


def sync_buffers(buffers: Sequence[Tensor]) -> None:
    """Rank 0's values, in place."""
    for buffer in buffers:
        dist.broadcast(buffer, 0)


def own_rows(value: Tensor, ranks: Layout) -> Tensor:
    """Those that this rank holds."""
    if ranks.shards == 1:
        return value
    rows = -(-value.shape[0] // ranks.shards)
    return value[ranks.place * rows : (ranks.place + 1) * rows]


def mean_over(value: Tensor, group: Any) -> Tensor:
    """In rank order, and in fp32 for 16-bit types."""
    if dist.get_world_size(group) == 1:
        return value
    parts = [torch.empty_like(value.contiguous()) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    wide = torch.promote_types(value.dtype, torch.float32)
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total / len(parts)).to(value.dtype)


def run(program: Any, constants: SimpleNamespace) -> None:
    """Run `program` between two folders: `rank0.pt` holds a list, of inputs or of outputs."""
    if len(sys.argv) not in (3, 4):
        sys.exit("usage: torchrun --nproc-per-node RANKS program.py INPUTS OUTPUTS [SEED]")
    inputs, outputs = map(Path, sys.argv[1:3])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    name = f"rank{dist.get_rank()}.pt"
    given = torch.load(inputs / name, weights_only=False)
    if len(sys.argv) > 3:
        torch.manual_seed(int(sys.argv[3]))
    with torch.no_grad():
        results = program(constants, *given)
    outputs.mkdir(parents=True, exist_ok=True)
    torch.save(list(results), outputs / name)
    dist.barrier()  # nobody leaves while others still receive
    dist.destroy_process_group()
