"""Kernels and numbers for them, for hypothesis: odd shapes, all codecs, extremes."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import strategies as st
from torch import Tensor

from zerofx.ir.kernels import KernelSpec, Pack, Repack, Unpack, errors_of, num_blocks
from zerofx.ir.parcels import DTYPES, Codec, Member, Parcels

BLOCKS = (32, 64, 256)
ALL_CODECS = [
    *(
        Codec(code, 64, symmetric, rounding)
        for code, symmetric, rounding in itertools.product(
            ("int8", "int4"), (True, False), ("nearest", "stochastic")
        )
    ),
    Codec("fp8", 64),
]


@st.composite
def codecs(draw: st.DrawFn, block: int | None = None) -> Codec:
    return dataclasses.replace(
        draw(st.sampled_from(ALL_CODECS)),
        block=block or draw(st.sampled_from(BLOCKS)),
        feedback=draw(st.booleans()),
    )


@st.composite
def parcels(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Parcels:
    """Up to three tensors; chunks that are empty, short, of one block or of several tiles."""
    nodes, local = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (3, 1), (2, 3)]))
    members: list[Member] = []
    for number in range(draw(st.integers(1, 3))):
        chunk = draw(st.sampled_from([0, 1, 31, 64, 100, 256, 1000]) | st.integers(0, 5000))
        whole = chunk * nodes * local
        numel = draw(st.sampled_from([whole, whole, max(0, whole - 1)]) | st.integers(0, whole))
        members.append(Member(f"t{number}", numel, chunk, draw(st.sampled_from(dtypes))))
    return Parcels(tuple(members), draw(codecs()), nodes * local, nodes)


@st.composite
def repacks(draw: st.DrawFn) -> Repack:
    codec = draw(codecs()).plain
    sources = draw(st.sampled_from([1, 2, 3, 4, 9]))
    blocks = draw(st.sampled_from([1, 4, 7, 8]) | st.integers(1, 200 * 32 // codec.block))
    return Repack(blocks, draw(st.integers(1, 3)), sources, codec, draw(codecs(codec.block)))


def values_for(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Numbers of every kind: each stretch of 50 is normal, or one of the extremes."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    largest, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    for start in range(0, values.shape[0], 50):
        part = values[start : start + 50]
        kind = int(torch.randint(0, 14, (), generator=generator))
        where = int(torch.randint(0, part.shape[0], (), generator=generator))
        match kind:
            case 0:
                part[where] = torch.inf
            case 1:
                part[where] = -torch.inf
            case 2:
                part[where] = torch.nan
            case 3:
                part *= 0  # zeros of both signs
            case 4:
                part[where] = largest
            case 5:
                part[where] = -largest
            case 6:
                part *= tiny
            case 7:
                part[:] = float(part[where])
            case 8:
                part *= 1e-38
            case _:
                pass
    return values.clamp(-largest, largest).where(values.isfinite(), values).to(dtype)


def wires_for(spec: Unpack | Repack, seed: int) -> Tensor:
    """Wires as ranks would pack them, with numbers of every kind."""
    from zerofx.codegen.reference import Reference

    if isinstance(spec, Unpack):
        source = dataclasses.replace(spec.parcels, codec=spec.parcels.codec.plain)
    else:
        numel = spec.num_blocks * spec.codec.block
        member = Member("all", numel * spec.num, numel, torch.float32)
        source = Parcels((member,), spec.codec, spec.num)
    wires: list[Tensor] = []
    for number in range(spec.num_sources):
        tensors = [values_for((m.numel,), m.dtype, seed + number) for m in source.members]
        wire = torch.full(source.shape, 255, dtype=torch.uint8)
        Reference(Pack(source))(tensors, [wire], seed + number)
        wires.append(wire)
    return torch.stack(wires)


def poisoned(spec: KernelSpec, byte: int = 255) -> list[Tensor]:
    """Outputs full of one byte; 0xFF makes a NaN.

    Two kernels that were given different bytes agree only where both have written.
    """
    out: list[Tensor] = []
    for shape, dtype in spec.outputs:
        size = torch.Size(shape).numel() * dtype.itemsize
        out.append(torch.full((size,), byte, dtype=torch.uint8).view(dtype).view(shape))
    return out


def outputs_for(spec: KernelSpec, seed: int, byte: int = 255) -> list[Tensor]:
    """Poisoned outputs; but errors as an earlier step left them, some of them large."""
    from zerofx.codegen.reference import Reference

    out = poisoned(spec, byte)
    if errors_of(spec):
        codec = spec.out if isinstance(spec, Repack) else spec.parcels.codec
        num, numel = out[1].shape[0], num_blocks(spec) * codec.block
        member = Member("errors", num * numel, numel, torch.float32)
        drawn = torch.randn(num * numel, generator=torch.Generator().manual_seed(seed))
        sizes = torch.logspace(-3, 1, num * num_blocks(spec)).repeat_interleave(codec.block)
        pack = Pack(Parcels((member,), codec.errors, num))
        Reference(pack)([drawn * sizes], out[1:])
    return out
