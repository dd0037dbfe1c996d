"""Kernels for the collectives of a program that send codes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import torch
from torch import fx

from zerofx.codegen.kernels import kernel_for
from zerofx.config import ZeroConfig, cache_folder
from zerofx.ir import ops
from zerofx.ir.codes import gather_kernels, reduction_kernels
from zerofx.ir.facts import facts
from zerofx.ir.kernels import KernelSpec, ReduceKernels, Repack, Unpack, errors_of
from zerofx.ir.parcels import Parcels
from zerofx.ir.program import Program
from zerofx.runtime.drift import Check
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
            _check(f"unshard {_bucket(start)}", parcels, make, start),
        )

    of(tuple(range(len(ops.members(start)))))
    return lambda members: of(tuple(members))


def reducing(program: Program, start: fx.Node, make: MakeKernel) -> Reducing | None:
    """Kernels of `reduce_start`; `None` if it is exact."""
    if not ops.codecs(start):
        return None
    kernels = reduction_kernels(program, start)
    parcels, name = kernels.pack.parcels, f"reduce {_bucket(start)}"
    repack = make(kernels.repack, start) if kernels.repack is not None else None
    checks = (_check(name, parcels, make, start),)
    if kernels.repack is not None:
        checks += (
            _check_of_repack(f"{name}, between nodes", kernels, kernels.repack, make, start),
        )
    return Reducing(
        make(kernels.pack, start),
        repack,
        make(kernels.unpack, start),
        parcels.shape[1],
        kernels.unpack.parcels.shape[1],
        tuple((member.dtype, member.numel) for member in kernels.unpack.parcels.members),
        tuple(errors_of(each) for each in (kernels.pack, kernels.repack) if each is not None),
        checks,
    )


def _bucket(start: fx.Node) -> str:
    record = facts(start)
    return record.bucket or ", ".join(record.members)


def _check(
    name: str, coded: Parcels, make: MakeKernel, start: fx.Node, given: Unpack | None = None
) -> Check:
    """What decodes `coded` for the drift monitor; its kernels are made when it needs them."""
    return Check(
        name,
        coded.codec,
        tuple(member.name for member in coded.members),
        tuple(member.numel for member in coded.members),
        sent=functools.partial(make, _decoding(coded), start),
        given=functools.partial(make, given, start) if given is not None else None,
    )


def _check_of_repack(
    name: str, kernels: ReduceKernels, repack: Repack, make: MakeKernel, start: fx.Node
) -> Check:
    """Likewise for the second hop: all N chunks that go from here, padded."""
    members = tuple(
        dataclasses.replace(member, numel=member.chunk * repack.num)
        for member in kernels.unpack.parcels.members
    )
    came = _decoding(Parcels(members, repack.codec, repack.num), repack.num_sources)
    return _check(name, Parcels(members, repack.out, repack.num), make, start, came)


def _decoding(coded: Parcels, num_sources: int = 1) -> Unpack:
    """To fp32, so that only the codes are off."""
    members = tuple(dataclasses.replace(m, dtype=torch.float32) for m in coded.members)
    plain = dataclasses.replace(coded, members=members, codec=coded.codec.plain)
    return Unpack(plain, num_sources)
