"""Emitted kernels, interpreted, write the bits that the reference writes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.codegen.interpreter import Interpreter, interpreter
from tests.codegen.strategies import (
    BLOCKS,
    outputs_for,
    parcels,
    poisoned,
    repacks,
    values_for,
    wires_for,
)
from zerofx.codegen.many import merged
from zerofx.codegen.reference import Reference
from zerofx.codegen.tiles import tiling_of
from zerofx.ir.kernels import KernelSpec, Pack, Repack, Unpack
from zerofx.ir.parcels import Codec, Member, Parcels

pytest.importorskip("triton", reason="needs Triton: pip install 'zerofx[triton]'")

SEEDS = st.integers(0, 2**33)
QUICK = settings(max_examples=50, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(scope="module")
def triton() -> Iterator[Interpreter]:
    with interpreter() as found:
        yield found


def reference(spec: KernelSpec, inputs: list[Tensor], seed: int = 0) -> list[Tensor]:
    outputs = outputs_for(spec, seed)
    Reference(spec)(inputs, outputs, seed)
    return outputs


@QUICK
@given(parcels(), SEEDS, st.booleans())
def test_pack(triton: Interpreter, given: Parcels, seed: int, fp8: bool) -> None:
    spec = Pack(given)
    tensors = [values_for((m.numel,), m.dtype, seed) for m in given.members]
    found = triton.run(spec, tensors, outputs_for(spec, seed, 85), seed, fp8=fp8)
    for got, want in zip(found, reference(spec, tensors, seed), strict=True):
        assert torch.equal(got, want)


@QUICK
@given(parcels(), st.sampled_from([1, 1, 2, 3, 9]), SEEDS, st.booleans())
def test_unpack(
    triton: Interpreter, given: Parcels, num_sources: int, seed: int, fp8: bool
) -> None:
    spec = Unpack(given, num_sources)
    wires = wires_for(spec, seed)
    for got, want in zip(
        triton.run(spec, [wires], poisoned(spec, 85), fp8=fp8),
        reference(spec, [wires]),
        strict=True,
    ):
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(bits(got), bits(want))


def test_buckets_of_many_tensors(triton: Interpreter) -> None:
    """These are chosen by numbers; some have no elements, or fewer than their chunks."""
    sizes = [(n * 97 % 331, n * 41 % 3) for n in range(30)]
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        members = tuple(
            Member(name, max(0, 4 * chunk - less), chunk, dtype) for chunk, less in sizes
        )
        parcels = Parcels(members, Codec("int4", 32, symmetric=False), 4, 2)
        assert len(merged(tiling_of(Pack(parcels)).stretches)) == 1
        tensors = [values_for((m.numel,), m.dtype, 7) for m in members]
        wire = triton.run(Pack(parcels), tensors, poisoned(Pack(parcels), 85))
        assert torch.equal(wire[0], reference(Pack(parcels), tensors)[0])
        found = triton.run(Unpack(parcels), [wire[0][None]], poisoned(Unpack(parcels), 85))
        for got, want in zip(found, reference(Unpack(parcels), [wire[0][None]]), strict=True):
            assert torch.equal(bits(got), bits(want))


@QUICK
@given(repacks(), SEEDS, st.booleans())
def test_repack(triton: Interpreter, spec: Repack, seed: int, fp8: bool) -> None:
    wires = wires_for(spec, seed)
    found = triton.run(spec, [wires], outputs_for(spec, seed, 85), seed, fp8=fp8)
    for got, want in zip(found, reference(spec, [wires], seed), strict=True):
        assert torch.equal(got, want)


@QUICK
@given(st.sampled_from(BLOCKS), st.sampled_from([2, 3, 4, 9]), st.booleans())
def test_repack_in_words(triton: Interpreter, block: int, num_sources: int, wide: bool) -> None:
    """Nibbles of every value, at each place of a word, with scales of every kind."""
    codec = Codec("int4", block)
    spec = Repack(37, 2, num_sources, codec, Codec("int8", block) if wide else codec)
    assert tiling_of(spec).stripes
    wires = wires_for(spec, block)
    drawn = torch.Generator().manual_seed(num_sources)
    codes = wires[..., : 37 * spec.codec.block_bytes]
    codes.copy_(torch.randint(0, 256, codes.shape, generator=drawn, dtype=torch.uint8))
    (found,) = triton.run(spec, [wires], poisoned(spec, 85))
    assert torch.equal(found, reference(spec, [wires])[0])


def bits(value: Tensor) -> Tensor:
    """Bytes, with one NaN for all: which it is, is not laid down."""
    return value.where(~value.isnan(), 0).reshape(-1, 1).view(torch.uint8)
