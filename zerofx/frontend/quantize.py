"""Kernels for the collectives of a program that send codes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from torch import fx

from zerofx.codegen.kernels import kernel_for
from zerofx.config import ZeroConfig, cache_folder
from zerofx.ir import ops
from zerofx.ir.codes import gather_kernels, reduction_kernels
from zerofx.ir.kernels import KernelSpec
from zerofx.ir.program import Program
from zerofx.runtime.quantized import Gathering, GatheringOf, Kernel, Reducing

MakeKernel = Callable[[KernelSpec, fx.Node], Kernel]
"""Called with what a kernel does, and a node whose value lies on the device where it runs."""


def kernels_of(config: ZeroConfig) -> MakeKernel:
    """How `config` has kernels made: with `inner="eager"` they run op by op."""
    folder = (Path(config.dump) if config.dump else cache_folder()) / "kernels"

    def make(spec: KernelSpec, near: fx.Node) -> Kernel:
        device = near.meta["val"].device
        return kernel_for(spec, device, folder, compiled=config.inner == "inductor")

    return make


def gathering(program: Program, start: fx.Node, make: MakeKernel) -> GatheringOf | None:
    """Kernels of `unshard_start`, made at first use; `None` if it is exact."""
    if not ops.codecs(start):
        return None

    @functools.cache
    def of(members: tuple[int, ...]) -> Gathering:
        kernels = gather_kernels(program, start, members)
        parcels = kernels.pack.parcels
        return Gathering(
            make(kernels.pack, start),
            make(kernels.unpack, start),
            parcels.shape[1],
            tuple(map(parcels.places, range(len(members)))),
            tuple(parcels.codec.parcel_bytes(parcels.blocks_of(m)) for m in parcels.members),
        )

    of(tuple(range(len(ops.members(start)))))
    return lambda members: of(tuple(members))


def reducing(program: Program, start: fx.Node, make: MakeKernel) -> Reducing | None:
    """Kernels of `reduce_start`; `None` if it is exact."""
    if not ops.codecs(start):
        return None
    kernels = reduction_kernels(program, start)
    repack = make(kernels.repack, start) if kernels.repack is not None else None
    return Reducing(
        make(kernels.pack, start),
        repack,
        make(kernels.unpack, start),
        kernels.pack.parcels.shape[1],
        kernels.unpack.parcels.shape[1],
        tuple((member.dtype, member.numel) for member in kernels.unpack.parcels.members),
    )
