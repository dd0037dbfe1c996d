"""Quantized gathers and reductions of all ranks in one process: what ZeRO++ computes.

Every rank's kernels are the references; moving bytes is indexing. Nothing is left to
`torch.distributed`, so the runtime can be compared with this bit by bit.

Everything that a kernel must write is filled with 0xFF or NaN before.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.codegen.reference import Reference
from zerofx.ir.kernels import KernelSpec, ReduceKernels, UnshardKernels, errors_of


def unshard_quantized(
    kernels: UnshardKernels, shards: Sequence[Sequence[Tensor]], seed: int = 0
) -> list[list[Tensor]]:
    """What each rank gathers (qwZ).

    Args:
        kernels: of the bucket.
        shards: of each rank, of each member: its chunk, flat and padded.
        seed: for stochastic rounding; rank r takes `seed + r`.

    Returns:
        Of each rank, the padded full values, flat.
    """
    wires = [run_kernel(kernels.pack, one, seed + rank)[0] for rank, one in enumerate(shards)]
    wire = torch.cat(wires)
    return [run_kernel(kernels.unpack, [wire[None]]) for _ in shards]


Errors = list[list[list[Tensor]]]
"""Of each rank, of each hop, what feedback keeps from step to step: one tensor, or none."""


def zero_errors(kernels: ReduceKernels) -> Errors:
    """Errors of all ranks before the first step."""
    hops = [errors_of(spec) for spec in (kernels.pack, kernels.repack) if spec is not None]
    return [
        [[torch.zeros(shape, dtype=dtype) for shape, dtype in hop] for hop in hops]
        for _ in range(kernels.pack.parcels.num)
    ]


def reduce_quantized(
    kernels: ReduceKernels,
    grads: Sequence[Sequence[Tensor]],
    seed: int = 0,
    errors: Errors | None = None,
) -> list[list[Tensor]]:
    """What each rank keeps of a reduction (qgZ): its chunks of the mean over all ranks.

    Args:
        kernels: of the bucket, for d ranks on each of N nodes; rank r is number r mod d of node
            r div d.
        grads: of each rank, the full gradients, flat.
        seed: for stochastic rounding; rank r takes `seed + r` in the first hop and `seed + W + r`
            in the second.
        errors: of feedback, which are renewed; by default they begin at zero.

    Returns:
        Of each rank, its padded chunks, flat.
    """
    parcels = kernels.pack.parcels
    num_local, num_nodes, world = parcels.num_local, parcels.num_nodes, parcels.num
    kept = zero_errors(kernels) if errors is None else errors
    wires = [
        run_kernel(kernels.pack, one, seed + rank, kept[rank][0])[0]
        for rank, one in enumerate(grads)
    ]
    if kernels.repack is None:
        return [run_kernel(kernels.unpack, [_rows(wires, [rank])]) for rank in range(world)]
    halfway: list[Tensor] = []
    for rank in range(world):
        node, local = divmod(rank, num_local)
        neighbours = wires[node * num_local :][:num_local]
        mine = range(local * num_nodes, (local + 1) * num_nodes)
        came = _rows(neighbours, mine)
        halfway.append(run_kernel(kernels.repack, [came], seed + world + rank, kept[rank][1])[0])
    results: list[list[Tensor]] = []
    for rank in range(world):
        node, local = divmod(rank, num_local)
        results.append(run_kernel(kernels.unpack, [_rows(halfway[local::num_local], [node])]))
    return results


def _rows(wires: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """`uint8[sources, rows, bytes]`: what arrives from each source."""
    return torch.stack([wire[list(rows)] for wire in wires])


def run_kernel(
    spec: KernelSpec, inputs: Sequence[Tensor], seed: int = 0, errors: Sequence[Tensor] = ()
) -> list[Tensor]:
    """What the reference writes; it renews `errors`, which it also reads."""
    outputs = poisoned(spec)
    outputs[len(outputs) - len(errors) :] = errors
    Reference(spec)(inputs, outputs, seed)
    return outputs


def poisoned(spec: KernelSpec) -> list[Tensor]:
    """Outputs for a kernel, full of what no kernel writes."""
    return [
        torch.full(shape, 255 if dtype is torch.uint8 else torch.nan, dtype=dtype)
        for shape, dtype in spec.outputs
    ]
