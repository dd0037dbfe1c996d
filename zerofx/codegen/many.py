"""Buckets of many tensors: what tells them apart is chosen first; the rest is written once.

A branch for each tensor takes Triton a time that grows with their number squared, minutes for 150.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from zerofx.codegen.arithmetic import Lines
from zerofx.codegen.expressions import Expr
from zerofx.codegen.header import shown
from zerofx.codegen.sections import indented
from zerofx.codegen.tiles import Stretch
from zerofx.ir.parcels import Member

_FEW = 8
"""Most tensors that have a branch each, in which all sizes are known to the compiler."""

_NUMBERS = ("first_tile", "first_block", "num_blocks", "numel", "size")


def merged(stretches: tuple[Stretch, ...]) -> tuple[Stretch, ...]:
    """One stretch of variables that `selected` sets, in place of many; few stay as they are.

    So do those of several dtypes, since a variable has one, and of sizes beyond 32 bits.
    """
    dtypes = {each.member.dtype for each in stretches}
    largest = max((each.member.numel for each in stretches), default=0)
    if len(stretches) <= _FEW or len(dtypes) > 1 or largest >= 2**31:
        return stretches
    first_tile, first_block, num_blocks, numel, size = map(_symbol, _NUMBERS)
    member = Member("the tensor that was chosen", numel, size, dtypes.pop())
    num_tiles = sum(each.num_tiles for each in stretches)
    return (Stretch(member, "tensor", first_tile, num_tiles, first_block, num_blocks),)


def selected(stretches: Sequence[Stretch]) -> Lines:
    """Lines that choose a tensor by its tiles, half of what is left at a time."""
    if len(stretches) > 1:
        left, right = stretches[: len(stretches) // 2], stretches[len(stretches) // 2 :]
        lines = [f"if tile < {right[0].first_tile}:", *indented(selected(left))]
        return [*lines, "else:", *indented(selected(right))]
    (each,) = stretches
    member = each.member
    numbers = (each.first_tile, each.first_block, each.num_blocks, member.numel, member.chunk)
    pairs = zip(_NUMBERS, numbers, strict=True)
    lines = [f"# {shown(member.name)}", f"tensor = {each.name}"]
    return [*lines, *(f"{name} = {number}" for name, number in pairs)]


def _symbol(name: str) -> Expr:
    return sympy.Symbol(name, integer=True)
