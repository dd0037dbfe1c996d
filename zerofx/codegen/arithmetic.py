"""The arithmetic of codes as Triton source: what `zerofx.codegen.blocks` does, bit by bit.

Each function returns source lines. Blocks are rows; `x` is a tile of them, or `left` and `right`
are tiles of their halves.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.codegen.blocks import (
    HASH,
    TINY,
    has_exact_products,
    is_divided_early,
    num_steps,
    step,
)
from zerofx.ir.parcels import Codec

Lines = list[str]

ROUND, ROUND_BITS = 1.5 * 2**23, 0x4B400000
"""What rounds a number to the nearest integer when it is added, and the bits of it as an fp32."""

NEAREST = "# Added to 1.5 · 2²³, a number leaves its nearest integer in the low bits."
ORDER = "# As integers, magnitudes keep their order, and infinity and NaN exceed all others."


def names_of(num_parts: int) -> tuple[str, ...]:
    """What the parts of blocks are called."""
    return ("x",) if num_parts == 1 else ("left", "right")


def encode(codec: Codec, parts: Sequence[str]) -> Lines:
    """From `parts`, and `noise_…` if stochastic, to `code` (or `code_…`), `scale` and `low`."""
    bits = [f"tl.abs({part}).to(tl.int32, bitcast=True)" for part in parts]
    lines = [ORDER, *reduced("top", "max", bits)]
    if not codec.symmetric:
        lines += [*reduced("low", "min", parts), *reduced("high", "max", parts)]
    lines += scales(codec)
    if codec.code != "fp8" and codec.rounding == "nearest":
        lines += [NEAREST]
    for part in parts:
        above = part if codec.symmetric else f"({part} - low)"
        lines += [f"{part} = tl.where(finite, {above} * inverse, 0.0)"]
        lines += _rounded(codec, part)
    return lines + _joined(codec, parts)


def scales(codec: Codec) -> Lines:
    """From `top`, and `low` and `high` if asymmetric, to `finite`, `scale`, `inverse` and `low`."""
    lines = ["finite = top < 0x7F800000"]
    if codec.symmetric:
        lines += ["reach = top.to(tl.float32, bitcast=True)"]
    else:
        lines += ["reach = high - low", 'finite = finite & (reach < float("inf"))']
        lines += ["low = tl.where(finite & (low != 0.0), low, 0.0)"]
    lines += [f"scale = tl.maximum(reach * {step(codec)!r}, {TINY!r})"]
    if has_exact_products(codec):
        lines += ["# Without its last three bits, products with codes are exact."]
        lines += ["scale = (scale.to(tl.int32, bitcast=True) & ~7).to(tl.float32, bitcast=True)"]
    return [
        *lines,
        'scale = tl.where(finite, scale, float("nan"))',
        "inverse = tl.where(finite, tl.div_rn(1.0, scale), 0.0)",
    ]


def decode(codec: Codec, parts: Sequence[str]) -> Lines:
    """From `code` (or `code_…`), `scale` and `low` to `parts` in fp32."""
    lines: Lines = []
    if codec.code == "int4":
        lines += ["both = code.to(tl.int32)"]
        shifted = (28, 24) if codec.symmetric else (0, 4)
        for part, shift in zip(parts, shifted, strict=True):
            number = f"(both << {shift}) >> 28" if codec.symmetric else f"(both >> {shift}) & 15"
            lines += [f"{part} = ({number}).to(tl.float32) * scale"]
    for part in parts if codec.code != "int4" else ():
        byte = code_name(codec, part, parts)
        if codec.code == "fp8":
            lines += [f"{part} = from_e4m3({byte}) * scale"]
        elif codec.symmetric:
            lines += [f"{part} = {byte}.to(tl.int8, bitcast=True).to(tl.float32) * scale"]
        else:
            lines += [f"{part} = {byte}.to(tl.float32) * scale"]
    return lines + ([] if codec.symmetric else [f"{part} = {part} + low" for part in parts])


def code_name(codec: Codec, part: str, parts: Sequence[str]) -> str:
    """What holds the bytes of `part`."""
    return "code" if len(parts) == 1 or codec.code == "int4" else f"code_{part}"


def share(num_sources: int) -> str:
    """What is done to parameters of blocks: a power of two divides them, without rounding."""
    return f" * {1 / num_sources!r}" if num_sources > 1 and is_divided_early(num_sources) else ""


def divided(num_sources: int, part: str) -> Lines:
    """Lines that divide a sum by the number of its terms where parameters are not."""
    return (
        []
        if is_divided_early(num_sources)
        else [f"{part} = tl.div_rn({part}, {float(num_sources)!r})"]
    )


def functions(decoded: Sequence[Codec], out: Codec | None, *, fp8: bool) -> Lines:
    """Definitions that `decode` with any of `decoded` and `encode` with `out` rely on.

    `fp8` says whether the device converts to and from fp8.
    """
    lines: Lines = []
    if out and out.rounding == "stochastic":
        rounds = [
            line
            for shift, factor in HASH
            for line in (f"    x ^= x >> {shift}", f"    x *= 0x{factor:08X}" if factor else "")
            if line
        ]
        lines += ["@triton.jit", "def scrambled(x):"]
        lines += ['    """A permutation of 32-bit integers that looks random ("lowbias32")."""']
        lines += [*rounds, "    return x", "", ""]
        lines += _UNIFORM.splitlines()
    if out and out.code == "fp8":
        lines += (_CONVERT_TO_E4M3 if fp8 else _TO_E4M3).splitlines()
    if any(codec.code == "fp8" for codec in decoded):
        lines += (_CONVERT_FROM_E4M3 if fp8 else _FROM_E4M3).splitlines()
    return lines


def reduced(name: str, how: str, parts: Sequence[str]) -> Lines:
    """Lines that make `name`, the largest or smallest number of every row."""
    each = [f"tl.{how}({part}, axis=1, keep_dims=True)" for part in parts]
    if len(each) == 1:
        return [f"{name} = {each[0]}"]
    return [f"{name} = {each[0]}", f"{name} = tl.{how}imum({name}, {each[1]})"]


def _rounded(codec: Codec, part: str) -> Lines:
    """`part` becomes its code, in the low bits of an integer."""
    if codec.code == "fp8":
        return [f"{part} = to_e4m3({part})"]
    if codec.rounding == "nearest":
        return [f"{part} = ({part} + {ROUND!r}).to(tl.int32, bitcast=True)"]
    least = -num_steps(codec) if codec.symmetric else 0
    return [
        f"{part} = tl.floor({part} + noise_{part})",
        f"{part} = tl.minimum(tl.maximum({part}, {least}.0), {num_steps(codec)}.0).to(tl.int32)",
    ]


def _joined(codec: Codec, parts: Sequence[str]) -> Lines:
    if codec.code == "int4":
        left, right = parts
        return [f"code = (({left} & 15) | (({right} & 15) << 4)).to(tl.uint8)"]
    return [f"{code_name(codec, part, parts)} = {part}.to(tl.uint8)" for part in parts]


_UNIFORM = '''@triton.jit
def uniform(position, seed):
    """Numbers in (0, 1) with 23 random bits, from the seed and the position alone."""
    bits = scrambled(position.to(tl.uint32) ^ scrambled(seed.to(tl.uint32)))
    return ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07


'''

_TO_E4M3 = '''@triton.jit
def to_e4m3(x):
    """fp8 e4m3 of numbers up to 448, to the nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = (tl.abs(x) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) & 15
    return tl.where(size < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


'''

_FROM_E4M3 = '''@triton.jit
def from_e4m3(code):
    """The number that an fp8 e4m3 code stands for: its bits, as those of fp32, are 2⁻¹²⁰ of it."""
    bits = (code.to(tl.int8, bitcast=True).to(tl.int32) << 20) & ~0x78000000
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


'''

_CONVERT_TO_E4M3 = '''@triton.jit
def to_e4m3(x):
    """fp8 e4m3 of numbers up to 448, to the nearest, ties to even."""
    return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


'''

_CONVERT_FROM_E4M3 = '''@triton.jit
def from_e4m3(code):
    """The number that an fp8 e4m3 code stands for."""
    return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)


'''
