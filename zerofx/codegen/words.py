"""Repacks of int4 in words: functions of an emitted file that decode eight numbers at a time.

What bounds these kernels is how many instructions a multiprocessor issues. Byte by byte, a number
takes six of them, three on units with half as many lanes: two shifts, a conversion, a product, a
sum, and its share of taking bytes apart. Here it takes three and an eighth: one cuts it out of its
word, one takes away what it was cut out with, and one multiplies and adds; fused, these two round
as they do apart, since products are exact (see `zerofx.codegen.blocks`).

A tile comes in parts. Word c of a row holds the numbers 4c … 4c+3 of either half of the block in
turn, and each of these eight is a part. Rows are cut in two stripes of words if that leaves
16 bytes for a thread to load: what is done once for a row is then done by half as many threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.codegen import arithmetic
from zerofx.codegen.arithmetic import Lines
from zerofx.codegen.expressions import shifted
from zerofx.codegen.operands import as_int32
from zerofx.codegen.sections import call, function, indented, over_sources, params_of
from zerofx.codegen.tiles import WORD, Tiling
from zerofx.ir.parcels import Codec

_LANES = range(WORD)


def names_of(stripes: int) -> tuple[str, ...]:
    """What the parts of blocks are called, stripe by stripe, in the order of a word's bits."""
    return tuple(f"{stripe}{lane}" for stripe in "xy"[:stripes] for lane in _LANES)


def functions(codec: Codec, out: Codec, tiling: Tiling, wires: Sequence[int]) -> Lines:
    """Definitions of `mean_blocks` and `write_blocks`, and what they call.

    Args:
        codec: of what is read.
        out: of what is written.
        tiling: of the kernel.
        wires: sources, parcels of each, bytes of a parcel.
    """
    lines = [*_DECODE.format(products=_products()).splitlines(), *_LARGEST.splitlines()]
    lines += _mean_blocks(codec, tiling, wires)
    return [*lines, *_coded(out), *_write_blocks(out, tiling)]


def _products() -> str:
    """What `add` returns: each number of four bits, from its place in the word or in `high`.

    As low bits of an fp32 that is a power of two, it is added to it; with its sign bit flipped, it
    is 8 more than it was.
    """
    lines: Lines = []
    for lane in _LANES:
        word, at = ("word", 4 * lane) if lane < 5 else ("high", 4 * lane - 12)
        bits = (150 - at << 23) ^ (8 << at)
        number = f"cut({word}, 0x{15 << at:X}, 0x{bits:X}, used) - {2.0 ** (23 - at) + 8}"
        lines += [f"        tl.fma({number}, scale, x{lane}),"]
    return "\n".join(lines)


def _mean_blocks(codec: Codec, tiling: Tiling, wires: Sequence[int]) -> Lines:
    num_sources, num_parcels, size = wires
    loop, at = over_sources(0, num_sources, num_parcels * size, wide=tiling.wide)
    share = arithmetic.share(num_sources)
    parts = names_of(tiling.stripes)
    body = [
        f'"""Mean over the parcels of {num_sources} sources, added in their order."""',
        "zeros = tl.zeros_like(block + columns).to(tl.float32)",
        *(f"{part} = zeros" for part in parts),
        loop,
        f"    each = {at}",
        f"    words = each.to(tl.pointer_type(tl.int32)) + block * {codec.block // WORD} + columns",
        f"    params = {params_of('each', tiling.num_blocks * codec.block_bytes)}",
        f"    scale = tl.load(params, mask=used, other=0.0){share}",
    ]
    for number, stripe in enumerate(_stripes(parts)):
        names, first = ", ".join(stripe), number * (codec.block // len(parts))
        body += [f"    word = tl.load({shifted('words', first)}, mask=used, other=0)"]
        body += indented(call(f"{names} = add(word, scale, used, {names})"))
    body += [line for part in parts for line in arithmetic.divided(num_sources, part)]
    body += call(f"return {', '.join(parts)}")
    return function("mean_blocks", "parcel, block, columns, used", body)


def _coded(out: Codec) -> Lines:
    """A function that makes a word: the integers side by side, none of them negative until then."""
    num = 32 // out.bits
    places = sum(1 << out.bits * lane for lane in range(num))
    signs = places << out.bits - 1
    names = [f"x{lane}" for lane in range(num)]
    body = ['"""Numbers as a word of codes."""']
    body += [arithmetic.NEAREST]
    for name in names:
        body += [f"{name} = ({name} * inverse + {arithmetic.ROUND!r}).to(tl.int32, bitcast=True)"]
    body += [f"word = {names[-1]}"]
    body += [f"word = word * {1 << out.bits} + {name}" for name in reversed(names[:-1])]
    body += ["# Each with half of its range, and less the bits of 1.5 · 2²³."]
    body += [f"word += {as_int32(signs - arithmetic.ROUND_BITS * places)}"]
    body += [f"return tl.where(finite, word ^ {as_int32(signs)}, 0)"]
    return function("coded", f"finite, inverse, {', '.join(names)}", body)


def _write_blocks(out: Codec, tiling: Tiling) -> Lines:
    parts = names_of(tiling.stripes)
    stripes = _stripes(parts)
    tops = [f"largest({', '.join(stripe)})" for stripe in stripes]
    body = ['"""Encode blocks into a parcel."""', f"top = {tops[0]}"]
    body += [f"top = larger(top, {top})" for top in tops[1:]]
    body += [arithmetic.ORDER]
    body += ["top = tl.max(top.to(tl.int32, bitcast=True), axis=1, keep_dims=True)"]
    body += arithmetic.scales(out)
    row = f"block * {out.block_bytes // 4} + columns"
    body += [f"words = parcel.to(tl.pointer_type(tl.int32)) + {row}"]
    for number, stripe in enumerate(stripes):
        # Of int8, one word holds numbers of the left half of a block, another of the right.
        words = [stripe] if out.code == "int4" else [stripe[::2], stripe[1::2]]
        for half, names in enumerate(words):
            at = number * (out.block // len(parts)) + half * (out.block // WORD)
            body += call(f"word = coded(finite, inverse, {', '.join(names)})")
            body += [f"tl.store({shifted('words', at)}, word, mask=used)"]
    body += [f"params = {params_of('parcel', tiling.num_blocks * out.block_bytes)}"]
    body += ["tl.store(params, scale, mask=used)"]
    return function("write_blocks", f"parcel, block, columns, used, {', '.join(parts)}", body)


def _stripes(parts: Sequence[str]) -> list[Sequence[str]]:
    return [parts[begin : begin + WORD] for begin in range(0, len(parts), WORD)]


_DECODE = '''@triton.jit
def cut(word, mask: tl.constexpr, bits: tl.constexpr, used):
    """Bits of a word beside others, which make it an fp32."""
    # Of two constants, an instruction takes one; the compiler does not know the outcome of `where`.
    return ((word & mask) ^ tl.where(used, bits, 0)).to(tl.float32, bitcast=True)


@triton.jit
def add(word, scale, used, x0, x1, x2, x3, x4, x5, x6, x7):
    """Adds the eight numbers of a word, times the scale: exact products, so fused."""
    high = word >> 12
    return (
{products}
    )


'''

_LARGEST = '''@triton.jit
def larger(x, y):
    """The larger one, and NaN if one is."""
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x0, x1, x2, x3, x4, x5, x6, x7):
    """The largest magnitude of eight."""
    a, b = larger(tl.abs(x0), tl.abs(x1)), larger(tl.abs(x2), tl.abs(x3))
    c, d = larger(tl.abs(x4), tl.abs(x5)), larger(tl.abs(x6), tl.abs(x7))
    return larger(larger(a, b), larger(c, d))


'''
