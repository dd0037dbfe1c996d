"""Specs whose sources are golden and compiled for GPUs: every family, codec and kind of tail."""

from __future__ import annotations

import dataclasses

import torch

from zerofx.ir.kernels import KernelSpec, Pack, Repack, Unpack
from zerofx.ir.parcels import Codec, Member, Parcels

_WEIGHT = Member("layers.0.weight", 196_608, 49_152, torch.float32)
_BIAS = Member("layers.0.bias", 768, 192, torch.float32)
_ODD = Member("head.weight", 1001, 251, torch.bfloat16)
_BLOCK = (_WEIGHT, _BIAS)


def _parcels(codec: Codec, *members: Member, nodes: int = 1) -> Parcels:
    return Parcels(members, codec, 4, nodes)


def _low(member: Member) -> Member:
    return dataclasses.replace(member, dtype=torch.bfloat16)


_SHARD = Member("layers.0.weight", 49_152, 49_152, torch.bfloat16)
_RANDOM = Codec("int4", symmetric=False, rounding="stochastic")

CASES: dict[str, KernelSpec] = {
    "pack_int8": Pack(Parcels((_SHARD,), Codec("int8"), 1)),
    "pack_int4_two_hops": Pack(_parcels(Codec("int4"), *_BLOCK, _ODD, nodes=2)),
    "pack_int4_asymmetric_stochastic": Pack(_parcels(_RANDOM, _WEIGHT)),
    "pack_fp8": Pack(_parcels(Codec("fp8", 128), _WEIGHT)),
    "pack_int4_feedback": Pack(_parcels(Codec("int4", feedback=True), *_BLOCK, nodes=2)),
    "unpack_int8": Unpack(_parcels(Codec("int8"), *_BLOCK, _ODD)),
    "unpack_fp8": Unpack(_parcels(Codec("fp8", 128), _low(_WEIGHT))),
    "unpack_int4_mean": Unpack(Parcels((_SHARD,), Codec("int4"), 1), 3),
    "repack_int4": Repack(193, 2, 2, Codec("int4"), Codec("int4")),
    "repack_fp8": Repack(193, 2, 2, Codec("fp8"), Codec("fp8")),
    "repack_feedback": Repack(193, 2, 2, Codec("int4"), Codec("int8", feedback=True)),
    "repack_int4_to_int8": Repack(192, 4, 16, Codec("int4"), Codec("int8", rounding="stochastic")),
}

SHAPES: dict[str, KernelSpec] = {
    "pack_int8_small_blocks": Pack(_parcels(Codec("int8", 32), *_BLOCK, _ODD, nodes=4)),
    "pack_int4_large_blocks": Pack(_parcels(Codec("int4", 2048), *_BLOCK)),
    "pack_fp64": Pack(_parcels(Codec(), dataclasses.replace(_WEIGHT, dtype=torch.float64))),
    "pack_fp16": Pack(_parcels(Codec(), dataclasses.replace(_WEIGHT, dtype=torch.float16))),
    "pack_past_32_bits": Pack(_parcels(Codec(), Member("w", 1 << 30, 1 << 28, torch.float32))),
    "pack_many": Pack(
        _parcels(Codec(), *(Member(f"w{n}", 512, 128, torch.float32) for n in range(120)))
    ),
    "pack_feedback_asymmetric": Pack(
        _parcels(dataclasses.replace(_RANDOM, feedback=True), *_BLOCK, _ODD)
    ),
    "pack_feedback_fp8": Pack(_parcels(Codec("fp8", 1024, feedback=True), *_BLOCK, _ODD)),
    "unpack_many": Unpack(
        _parcels(Codec(), *(Member(f"w{n}", 512, 128, torch.float32) for n in range(40)))
    ),
    "unpack_mean_asymmetric": Unpack(_parcels(Codec("int4", symmetric=False), *_BLOCK), 8),
    "repack_32_sources": Repack(192, 4, 32, Codec("int8"), Codec("fp8")),
    "repack_int4_small_blocks": Repack(193, 4, 9, Codec("int4", 32), Codec("int8", 32)),
    "repack_int4_large_blocks": Repack(193, 4, 4, Codec("int4", 2048), Codec("int4", 2048)),
    "repack_past_32_bits": Repack(1 << 24, 1, 4, Codec("int4"), Codec("int4")),
    "repack_asymmetric": Repack(193, 4, 3, _RANDOM, _RANDOM),
}
"""More for the compiler."""
