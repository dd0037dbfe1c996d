"""The arithmetic of codes in plain torch, on whole blocks: what every kernel must compute.

All of it is fp32. A block with an infinity or a NaN (or, asymmetric, with a range beyond fp32) gets
the scale NaN and codes 0, so all of it comes back as NaN: it is never clipped to something finite.
Scales below 2⁻¹²⁶ are raised to that, so that their reciprocal is finite; zeros stay zeros. Scales
of symmetric int4 keep 21 significant bits: products with codes are exact, and kernels may fuse them
with sums.

Blocks come as parts: one tensor `[..., block]`, or the two halves of every block for `int4`, whose
byte i holds element i in its low bits and element i + block/2 in its high bits. So packing needs no
shuffle, and Inductor vectorises it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.ir.parcels import Codec

TINY = 2.0**-126
"""The least scale: the smallest normal fp32 number."""

HASH = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None))
"""Shift and factor of each round of the hash behind stochastic rounding ("lowbias32")."""

Parts = Sequence[Tensor]


def _step(count: int) -> float:
    bits = struct.unpack("<i", struct.pack("<f", 1 / count))[0]
    while True:
        value = struct.unpack("<f", struct.pack("<i", bits))[0]
        if count * value * (1 + 2.0**-24) <= 1:
            return value
        bits -= 1


_STEPS = {count: _step(count) for count in (7, 15, 127, 255, 448)}


def num_steps(codec: Codec) -> int:
    """What the largest magnitude (symmetric), or the range (asymmetric), of a block becomes."""
    if codec.code == "fp8":
        return 448
    return 2 ** (codec.bits - 1) - 1 if codec.symmetric else 2**codec.bits - 1


def code_dtype(codec: Codec, *, written: bool) -> torch.dtype:
    """What bytes of codes are seen as; Inductor vectorises no reinterpretation of single bytes."""
    if codec.code == "fp8":
        return torch.float8_e4m3fn if written else torch.uint8
    return torch.int8 if codec.code == "int8" and codec.symmetric else torch.uint8


def step(codec: Codec) -> float:
    """The fp32 number nearest below 1 / `num_steps` with which nothing decodes to more than it was.

    So the largest fp32 number stays finite.
    """
    return _STEPS[num_steps(codec)]


def has_exact_products(codec: Codec) -> bool:
    """Whether the three lowest bits of scales are zeros: codes have no more than three."""
    return codec.code == "int4" and codec.symmetric


def encode(parts: Parts, codec: Codec, noise: Parts | None = None) -> tuple[list[Tensor], Parts]:
    """Codes and parameters of blocks.

    Args:
        parts: fp32 `[..., block / k]` for each of k parts.
        codec: how to write them.
        noise: fp32 in (0, 1), as large as the blocks, in as many parts as `codec` stores; only for
            stochastic rounding.

    Returns:
        Codes of `code_dtype`, in as many parts as the blocks come in (one for int4), and fp32
        scales `[...]`, followed by lows if asymmetric.
    """
    low = None if codec.symmetric else _least(parts)
    if low is None:
        reach = _largest([part.abs() for part in parts])
    else:
        reach = _largest(parts) - low
    finite = reach.isfinite()
    scale = (reach * step(codec)).clamp_min(TINY)
    if has_exact_products(codec):
        scale = (scale.view(torch.int32) & ~7).view(torch.float32)
    scale = torch.where(finite, scale, math.nan)
    inverse = torch.where(finite, 1 / scale, 0.0)[..., None]
    numbers: list[Tensor] = []
    for number, part in enumerate(_split(parts, codec)):
        above = part if low is None else part - low[..., None]
        scaled = torch.where(finite[..., None], above * inverse, 0.0)
        numbers.append(_round(scaled, codec, noise[number] if noise else None))
    # A negative zero would depend on the order in which zeros were compared.
    params = [scale] if low is None else [scale, torch.where(finite & (low != 0), low, 0.0)]
    return _codes(numbers, codec), params


def decode(codes: Tensor, params: Parts, codec: Codec) -> list[Tensor]:
    """Blocks from their codes, in fp32: one part, or the two halves for int4.

    Args:
        codes: of `code_dtype`, `[..., block_bytes]`.
        params: scales `[...]`, and lows if asymmetric.
        codec: how they were written.
    """
    scale = params[0][..., None]
    values = [number * scale for number in _numbers(codes, codec)]
    return values if codec.symmetric else [value + params[1][..., None] for value in values]


KEPT, NEW = 0.8, 0.2
"""Weights of older and new errors in the average that feedback keeps (LoCo, arXiv 2407.04480)."""

LIMIT = 0.25
"""Errors beyond this part of the largest magnitude of their block are of another time: no codec
makes such large ones. They are forgotten, so that neither a burst nor a new loss scale lasts."""


def with_errors(
    parts: Parts, codec: Codec, codes: Tensor, params: Parts
) -> tuple[list[Tensor], list[Tensor]]:
    """Blocks with the errors of earlier ones added, and what was added, in parts as `codec` stores.

    Args:
        parts: fp32 blocks.
        codec: how they will be written.
        codes: the errors, as `codec.errors` wrote them.
        params: their scales.
    """
    parts = _split(parts, codec)
    errors = decode(codes, params, codec.errors)[0].chunk(len(parts), -1)
    limit = (_largest([part.abs() for part in parts]) * LIMIT)[..., None]
    added = [torch.where(error.abs() > limit, 0.0, error) for error in errors]
    return [part + error for part, error in zip(parts, added, strict=True)], added


def next_errors(sent: Parts, added: Parts, codes: Parts, params: Parts, codec: Codec) -> Parts:
    """The moving average of errors, now that `sent` was coded; zeros in blocks not finite.

    Args:
        sent: what was coded, errors included.
        added: those errors.
        codes: what it became; with `params`, as `encode` returns them.
        params: scales, and lows if asymmetric.
        codec: of `codes`.
    """
    as_read = [code.view(torch.uint8) if codec.code == "fp8" else code for code in codes]
    back = [value for code in as_read for value in decode(code, params, codec)]
    news = [KEPT * e + NEW * (x - y) for e, x, y in zip(added, sent, back, strict=True)]
    return [torch.where(y.isnan(), 0.0, new) for y, new in zip(back, news, strict=True)]


def is_divided_early(num_sources: int) -> bool:
    """Whether parameters of blocks are divided by the number of sources, and not their sum."""
    return num_sources & (num_sources - 1) == 0


def mean(codes: Tensor, params: Parts, codec: Codec) -> list[Tensor]:
    """Mean over the first axis of decoded blocks, added in its order.

    A power of two of them is divided by in the parameters of blocks, another number at the end.
    """
    num_sources = codes.shape[0]
    early = is_divided_early(num_sources)
    if early and num_sources > 1:
        params = [param / num_sources for param in params]
    total = decode(codes[0], [param[0] for param in params], codec)
    for source in range(1, num_sources):
        more = decode(codes[source], [param[source] for param in params], codec)
        total = [one + other for one, other in zip(total, more, strict=True)]
    return total if early else [one / num_sources for one in total]


def noise(seed: Tensor, start: Tensor, num_blocks: int, block: int, num_parts: int) -> list[Tensor]:
    """Uniform numbers in (0, 1) that depend on the seed and on each element's position only.

    Args:
        seed: int32, no dimensions.
        start: int32 `[n]`, position of the first element of each row.
        num_blocks: blocks of a row.
        block: numbers in a block.
        num_parts: 1, or 2 for halves of blocks.

    Returns:
        fp32 `[n, num_blocks, block / num_parts]` for each part, with 23 random bits.
    """
    width = block // num_parts
    key = _hash(seed)
    like = {"dtype": torch.int32, "device": start.device}
    row = torch.arange(num_blocks, **like)[:, None] * block
    position = start[:, None, None] + row + torch.arange(width, **like)
    hashes = [_hash((position + part * width) ^ key) for part in range(num_parts)]
    # Never 0: a sum with it is never subnormal, which CUDA's `floor` takes for 0.
    return [(((bits >> 9) & 0x7FFFFF).float() + 0.5) * 2.0**-23 for bits in hashes]


def _hash(x: Tensor) -> Tensor:
    """A permutation of 32-bit integers whose output looks random."""
    for shift, factor in HASH:
        x = x ^ ((x >> shift) & ((1 << (32 - shift)) - 1))
        if factor is not None:
            x = x * (factor if factor < 2**31 else factor - 2**32)
    return x


def _largest(parts: Parts) -> Tensor:
    values = [part.amax(-1) for part in parts]
    return values[0] if len(values) == 1 else torch.maximum(*values)


def _least(parts: Parts) -> Tensor:
    values = [part.amin(-1) for part in parts]
    return values[0] if len(values) == 1 else torch.minimum(*values)


def _split(parts: Parts, codec: Codec) -> Parts:
    """Parts as the codec stores them; more parts than it needs stay as they are."""
    if codec.code != "int4" or len(parts) == 2:
        return parts
    return parts[0].chunk(2, -1)


def _round(scaled: Tensor, codec: Codec, noise: Tensor | None) -> Tensor:
    if codec.code == "fp8":
        return scaled
    if noise is None:
        return scaled.round()
    # The sum may round up to one code more than there is.
    least = -num_steps(codec) if codec.symmetric else 0
    return (scaled + noise).floor().clamp(least, num_steps(codec))


def _codes(numbers: Parts, codec: Codec) -> list[Tensor]:
    if codec.code == "int4":
        low, high = (number.to(torch.int32) & 15 for number in numbers)
        return [(low | (high << 4)).to(torch.uint8)]
    return [number.to(code_dtype(codec, written=True)) for number in numbers]


def _numbers(codes: Tensor, codec: Codec) -> list[Tensor]:
    """Codes as fp32 numbers, in parts."""
    if codec.code == "fp8":
        return [_from_e4m3(codes.to(torch.int32))]
    if codec.code == "int8":
        return [codes.float()]
    # Bits are picked in bytes: beside 16-bit results, Inductor turns them into int32 one by one.
    low, high = codes & 15, codes & 240
    if codec.symmetric:
        # With its sign bit flipped, a number of four bits is 8 more than it was.
        return [(low ^ 8).float() - 8, (high ^ 128).float() * 2.0**-4 - 8]
    return [low.float(), high.float() * 2.0**-4]


def _from_e4m3(code: Tensor) -> Tensor:
    """The number that an fp8 code stands for; Inductor does not vectorise torch's conversion."""
    size = code & 0x7F
    normal = ((size << 20) + 0x3C000000).view(torch.float32)
    value = torch.where(size < 8, size.float() * 2.0**-9, normal)
    return torch.where(code < 0x80, value, -value)
