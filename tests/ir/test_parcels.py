"""Sizes and places of parcels, and the kernels of a bucket."""

from __future__ import annotations

import dataclasses

import pytest
import sympy
import torch

from tests.program_builder import layout_of, specs_of
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.ir.kernels import Repack, operand_bytes, reduce_kernels, unshard_kernels
from zerofx.ir.parcels import Codec, Member, Parcels, place

CODECS = [
    Codec(),
    Codec("int4", 128),
    Codec("int8", 32, symmetric=False),
    Codec("int4", 2048, symmetric=False, rounding="stochastic"),
    Codec("fp8", 64),
]


def test_bytes_as_a_formula() -> None:
    n = sympy.Symbol("n", integer=True, positive=True)
    assert str(Codec("int8", 256).parcel_bytes(n)) == "256*n - 16*floor(-n/4)"
    assert str(Codec("int4", 128, symmetric=False).parcel_bytes(n)) == "64*n - 32*floor(-n/4)"
    for codec in CODECS:
        for number in (1, 2, 3, 4, 5, 191):
            size = codec.parcel_bytes(number)
            assert size == codec.parcel_bytes(n).subs(n, number)
            assert size % 16 == 0 and number * codec.block_bytes % 16 == 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"code": "int3"}, "int3"),
        ({"rounding": "up"}, "up"),
        ({"block": 48}, "48"),
        ({"block": 16}, "from 32"),
        ({"block": 4096}, "to 2048"),
        ({"code": "fp8", "symmetric": False}, "fp8"),
        ({"code": "fp8", "rounding": "stochastic"}, "int8"),
    ],
)
def test_codecs_that_do_not_exist(given: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Codec(**given)


def test_names() -> None:
    assert [codec.name for codec in CODECS] == [
        "int8x256",
        "int4x128",
        "int8x32.asymmetric",
        "int4x2048.asymmetric.stochastic",
        "fp8x64",
    ]
    assert all(Codec.parse(codec.name) == codec for codec in CODECS)
    for name in ("fp8-e4m3x64", "fp8_e4m3x64"):
        assert Codec.parse(name).name == "fp8x64", "the format is the only one that there is"
    with pytest.raises(ConfigError, match="is no codec"):
        Codec.parse("int8-e4m3")


def test_members_start_at_blocks() -> None:
    members = [Member(str(n), 3 * n, n, torch.float32) for n in (1, 64, 65, 0, 130)]
    parcels = Parcels(tuple(members), Codec("int4", 64), 3)
    assert parcels.first_blocks == (0, 1, 2, 4, 4)
    assert parcels.num_blocks == 7 and parcels.shape == (3, 7 * 32 + 8 * 4)
    assert [members[4].count(p) for p in range(4)] == [130, 130, 130, 0]
    assert [dataclasses.replace(members[4], numel=140).count(p) for p in range(3)] == [130, 10, 0]


@pytest.mark.parametrize(
    ("member", "num", "nodes", "says"),
    [
        (Member("layer.ids", 4, 2, torch.int64), 2, 1, "layer.ids"),
        (Member("layer.c", 4, 2, torch.complex64), 2, 1, "layer.c"),
        (Member("layer.w", 5, 2, torch.float32), 2, 1, "layer.w"),
        (Member("layer.w", 4, 2, torch.float32), 3, 2, "3 parcels"),
    ],
)
def test_parcels_that_do_not_exist(member: Member, num: int, nodes: int, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        Parcels((member,), Codec(), num, nodes)


def test_blocks_of_two_sizes_do_not_mix() -> None:
    with pytest.raises(UnsupportedError, match="int4x64 cannot become int8x32"):
        Repack(4, 2, 2, Codec("int4", 64), Codec("int8", 32))


def test_place_is_that_of_the_paper() -> None:
    assert [place(p, 2, 4) for p in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(("local", "nodes"), [(1, 4), (2, 2), (4, 1), (4, 8), (8, 3)])
def test_place_groups_by_local_rank(local: int, nodes: int) -> None:
    world = local * nodes
    rows = {place(p, local, nodes): p for p in range(world)}
    assert sorted(rows) == list(range(world))
    for rank in range(local):
        together = [rows[row] for row in range(rank * nodes, (rank + 1) * nodes)]
        assert together == [node * local + rank for node in range(nodes)]


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_kernels_of_a_gather(world: int) -> None:
    specs = list(specs_of({"w": (5, 3), "b": (1,)}, layout_of(world, 1)).values())
    kernels = unshard_kernels(specs, Codec("int8", 32))
    assert kernels.pack.outputs[0][0] == (1, kernels.unpack.parcels.shape[1])
    for spec, (shape, dtype) in zip(specs, kernels.unpack.outputs, strict=True):
        assert shape == (spec.padded_numel,) and dtype == spec.dtype


@pytest.mark.parametrize(
    ("world", "nodes", "hops"), [(4, 1, 1), (4, 4, 1), (4, 2, 2), (1, 1, 1), (32, 8, 2)]
)
def test_kernels_of_a_reduction(world: int, nodes: int, hops: int) -> None:
    specs = list(specs_of({"w": (50, 3), "b": (7,)}, layout_of(world, 1)).values())
    codec = Codec("int4", 32)
    kernels = reduce_kernels(specs, codec, codec, nodes, [torch.bfloat16] * len(specs))
    assert kernels.pack.inputs == (((150,), torch.bfloat16), ((7,), torch.bfloat16))
    assert (kernels.repack is not None) == (hops == 2)
    if kernels.repack is not None:
        assert kernels.repack.inputs[0][0][:2] == (world // nodes, nodes)
        assert kernels.repack.outputs[0][0][1] == kernels.unpack.inputs[0][0][2]
        assert kernels.unpack.num_sources == nodes
    else:
        assert kernels.unpack.num_sources == world


def test_bytes_moved() -> None:
    specs = list(specs_of({"w": (64, 4)}, layout_of(2, 1)).values())
    kernels = unshard_kernels(specs, Codec("int8", 32))
    assert operand_bytes(kernels.pack) == 128 * 8 + (128 + 4 * 4)
    assert operand_bytes(kernels.unpack) == 256 * 8 + 2 * (128 + 4 * 4)
