"""Quantizers of other libraries, beside which `benchmarks.kernels` puts zerofx's on CUDA.

Each is left out where its library is missing. DeepSpeed builds its kernels when they are first
asked for, which needs nvcc.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zerofx.ir.parcels import Codec


@dataclasses.dataclass(frozen=True)
class Peer:
    """What another library does to the same numbers.

    Attributes:
        kernel: of the family that it is of, as `benchmarks.kernels` calls them.
        run: on CUDA tensors that it holds.
        num_bytes: read and written, each once.
    """

    kernel: str
    run: Callable[[], Any]
    num_bytes: int


def torchao(codec: Codec, numel: int, num_sources: int) -> Iterator[Peer]:
    """torchao's affine primitives, compiled by Inductor, as it does; it stores int4 one by one."""
    if codec.code != "int8" or not importlib.util.find_spec("torchao"):
        return
    ao = importlib.import_module("torchao.quantization.quant_primitives")
    x = torch.randn(numel // codec.block, codec.block, device="cuda")
    size, int8 = (1, codec.block), torch.int8

    @torch.compile
    def quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scale, zero = ao.choose_qparams_affine(x, ao.MappingType.SYMMETRIC, size, int8)
        return ao.quantize_affine(x, size, scale, zero, int8), scale, zero

    @torch.compile
    def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return ao.dequantize_affine(codes, size, scale, zero, int8, output_dtype=torch.float32)

    coded = quantize(x)
    num_bytes = x.nbytes + sum(each.nbytes for each in coded)
    yield Peer("pack", lambda: quantize(x), num_bytes)
    yield Peer("unpack", lambda: dequantize(*coded), num_bytes)


def deepspeed(codec: Codec, numel: int, num_sources: int) -> Iterator[Peer]:
    """The CUDA kernels of ZeRO++ in DeepSpeed, which read fp16 and reduce a node's gradients."""
    if codec.code not in ("int8", "int4") or not importlib.util.find_spec("deepspeed"):
        return
    ds = importlib.import_module("deepspeed.ops.op_builder").QuantizerBuilder().load()
    kind, bits, groups = ds.QuantizationType.Symmetric, codec.bits, numel // codec.block
    x = torch.randn(groups, codec.block, device="cuda", dtype=torch.float16)
    codes, scales = ds.quantize(x, groups, bits, kind)
    size = codes.nbytes + scales.nbytes
    yield Peer("pack", lambda: ds.quantize(x, groups, bits, kind), x.nbytes + size)
    yield Peer(
        "unpack", lambda: ds.dequantize_fp32(codes, scales, groups, bits, kind), size + 4 * numel
    )
    flat, left = codes.view(-1), groups // num_sources
    yield Peer(
        "repack",
        lambda: ds.quantized_reduction(flat, scales, groups, left, bits, kind, num_sources),
        size + size // num_sources,
    )


PEERS = {"torchao": torchao, "DeepSpeed": deepspeed}
"""By name; each yields what it has for a codec, and nothing where it is not installed."""
