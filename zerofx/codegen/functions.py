"""The three functions of blocks that a reference is made of, op by op or compiled by Inductor."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from zerofx.codegen import blocks
from zerofx.ir.parcels import Codec
from zerofx.torch_private import compile_for_sizes

Function = Callable[..., object]


def function_for(
    kind: str,
    codec: Codec,
    out: Codec,
    operands: Sequence[Tensor],
    *,
    compiled: bool,
    device: torch.device,
) -> Function:
    """`pack`, `unpack` or `repack` for operands of these kinds; it writes the last of them.

    Operands, for c chunks of n blocks and s sources, in this order (lows if asymmetric):

    * pack: values `[c, n, block]`; codes `[c, n, block_bytes]`, scales and lows `f32[c, n]`;
    * unpack: codes, scales, lows with s as first axis; values, in halves for int4;
    * repack: codes, scales, lows as for unpack; codes, scales, lows as for pack.

    Feedback takes errors after what is written, codes and scales, and writes them too. Stochastic
    rounding takes two more: the position of each chunk's first element `int32[c]`, and
    the seed `int32`.
    """
    if not compiled:
        return _MAKERS[kind](codec, out)
    axes = _axes(kind, codec, out)[: len(operands)]
    kinds = tuple(_Kind.of(*pair) for pair in zip(operands, axes, strict=True))
    return _compiled(kind, codec, out, kinds, device)


def _axes(kind: str, codec: Codec, out: Codec) -> list[str]:
    """The axes of each operand: s sources, c chunks, n blocks, b within a block."""
    read = ["scnb"] + ["scn"] * codec.num_params
    written = ["cnb"] + ["cn"] * out.num_params + ["cnb", "cn"] * out.feedback
    if kind == "unpack":
        return [*read, "cnb", "cnb"]
    return [*(["cnb"] if kind == "pack" else read), *written, "c", ""]


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What operands have in common that one compilation serves.

    Attributes:
        axes: see `_axes`.
        sizes: 0 where they may vary: blocks, and chunks unless there is only one.
        dtype: of the elements.
    """

    axes: str
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(operand: Tensor, axes: str) -> _Kind:
        sizes = zip(operand.shape, axes, strict=True)
        return _Kind(axes, tuple(0 if a in "cn" and s > 1 else s for s, a in sizes), operand.dtype)


@cache
def _compiled(
    kind: str, codec: Codec, out: Codec, kinds: tuple[_Kind, ...], device: torch.device
) -> Function:
    """Compiled for operands of these kinds, by an example in which all that may vary differs.

    Strides vary too, or Inductor would join the axes of values that it copies, and no longer fuse
    the copy with the arithmetic.
    """
    sources = kinds[0].sizes[0] if kind != "pack" else 0
    primes = [prime for prime in (5, 7, 11) if prime != sources]
    varying, far = dict(zip("cn", primes, strict=False)), itertools.count(10_007, 2)
    examples = [
        torch.empty_strided(
            [size or varying[axis] for size, axis in zip(each.sizes, each.axes, strict=True)],
            [next(far) for _ in each.axes[1:]] + [1] * bool(each.axes),
            dtype=each.dtype,
            device=device,
        )
        for each in kinds
    ]
    run = compile_for_sizes(_MAKERS[kind](codec, out), examples)
    return lambda *operands: run(list(operands))


def _pack(codec: Codec, out: Codec) -> Function:
    def pack(*operands: Tensor) -> None:
        values = operands[0]
        assert values.shape[-1] == codec.block
        _encode([values.float()], codec, values.shape[1], operands[1:])

    return pack


def _unpack(codec: Codec, out: Codec) -> Function:
    num_read = 1 + codec.num_params

    def unpack(*operands: Tensor) -> None:
        codes, *params = operands[:num_read]
        assert codes.shape[-1] == codec.block_bytes
        for part, value in zip(operands[num_read:], blocks.mean(codes, params, codec), strict=True):
            part.copy_(value)

    return unpack


def _repack(codec: Codec, out: Codec) -> Function:
    num_read = 1 + codec.num_params

    def repack(*operands: Tensor) -> None:
        codes, *params = operands[:num_read]
        assert codes.shape[-1] == codec.block_bytes
        _encode(blocks.mean(codes, params, codec), out, codes.shape[2], operands[num_read:])

    return repack


_MAKERS = {"pack": _pack, "unpack": _unpack, "repack": _repack}


def _encode(parts: blocks.Parts, codec: Codec, num_blocks: int, operands: Sequence[Tensor]) -> None:
    """Write blocks to `operands`: codes, scales, lows; errors with feedback; then counters."""
    ends = (1 + codec.num_params, 1 + codec.num_params + 2 * codec.feedback)
    written, errors, counters = operands[: ends[0]], operands[slice(*ends)], operands[ends[1] :]
    added: list[Tensor] = []
    noise = _noise(counters, num_blocks, codec, len(parts))
    if codec.feedback:
        parts, added = blocks.with_errors(parts, codec, errors[0], errors[1:])
    codes, params = blocks.encode(parts, codec, noise)
    _write((codes, params), written)
    if codec.feedback:
        news = blocks.next_errors(parts, added, codes, params, codec)
        _write(blocks.encode(news, codec.errors), errors)


def _noise(
    counters: Sequence[Tensor], num_blocks: int, codec: Codec, num_parts: int
) -> list[Tensor] | None:
    if not counters:
        return None
    start, seed = counters
    halves = max(num_parts, 2 if codec.code == "int4" else 1)
    return blocks.noise(seed, start, num_blocks, codec.block, halves)


def _write(encoded: tuple[Sequence[Tensor], Sequence[Tensor]], written: Sequence[Tensor]) -> None:
    codes, params = encoded
    assert written[0].shape[-1] == sum(code.shape[-1] for code in codes)
    into = written[0].chunk(len(codes), -1) if len(codes) > 1 else written[:1]
    for part, value in zip((*into, *written[1:]), (*codes, *params), strict=True):
        part.copy_(value)
