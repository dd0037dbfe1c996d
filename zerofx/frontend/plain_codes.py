"""How a standalone program exchanges codes: zerofx's reference kernels, and all to all ranks.

The `program.py` of a quantized program holds the text of this file behind that of `plain_ops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from zerofx.codegen.reference import Reference
from zerofx.frontend.plain_ops import Layout, mean_over, own_rows
from zerofx.ir.kernels import KernelSpec, ReduceKernels, UnshardKernels


def unshard_codes(
    shards: Sequence[Tensor], sizes: Sequence[Sequence[int]], ranks: Layout, kernels: UnshardKernels
) -> list[Tensor]:
    """Full values of a bucket: what the parcels of all ranks say."""
    members = kernels.pack.parcels.members
    pairs = zip(shards, members, strict=True)
    chunks = [pad(shard.reshape(-1), (0, each.chunk - shard.numel())) for shard, each in pairs]
    fulls = run_kernel(kernels.unpack, [torch.cat(exchanged(kernels.pack, chunks, ranks))[None]])
    return [full[: math.prod(size)].view(*size) for full, size in zip(fulls, sizes, strict=True)]


def reduce_codes(grads: Sequence[Tensor], ranks: Layout, kernels: ReduceKernels) -> list[Tensor]:
    """Of each gradient's mean over all ranks, the rows that this rank owns."""
    flat = [grad.to(ranks.reduce_dtype or grad.dtype).reshape(-1) for grad in grads]
    wires = exchanged(kernels.pack, flat, ranks)
    if kernels.repack is None:
        arrived = [wire[ranks.place] for wire in wires]
    else:
        # Between the hops: the mean over each node, of what goes to ranks with this one's place.
        num_local, num_nodes = kernels.repack.num_sources, kernels.repack.num
        node, local = divmod(ranks.place, num_local)
        rows = slice(local * num_nodes, (local + 1) * num_nodes)
        nodes = [wires[start : start + num_local] for start in range(0, len(wires), num_local)]
        inside = [torch.stack([wire[rows] for wire in each]) for each in nodes]
        arrived = [run_kernel(kernels.repack, [each])[0][node] for each in inside]
    chunks = run_kernel(kernels.unpack, [torch.stack(arrived)[:, None]])
    means: list[Tensor] = []
    for grad, chunk in zip(grads, chunks, strict=True):
        owned = own_rows(grad, ranks)
        means.append(mean_over(chunk[: owned.numel()].view(owned.shape), ranks.alike))
    return means


def exchanged(pack: KernelSpec, tensors: Sequence[Tensor], ranks: Layout) -> list[Tensor]:
    """The parcels of all ranks."""
    (wire,) = run_kernel(pack, tensors)
    wires = [torch.empty_like(wire) for _ in range(ranks.shards)]
    dist.all_gather(wires, wire, group=ranks.together)
    return wires


def run_kernel(spec: KernelSpec, inputs: Sequence[Tensor]) -> list[Tensor]:
    """What the kernel writes."""
    outputs = [inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in spec.outputs]
    Reference(spec)(inputs, outputs, 0)
    return outputs
