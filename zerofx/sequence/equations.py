"""Products and lookups as equations: a dimension of the result is cut in all operands alike."""

from __future__ import annotations

import string

from torch import fx

from zerofx.sequence.cuts import Cut
from zerofx.sequence.graph import Editor, Result

PRODUCTS = {
    "linear": "*i,oi,o->*o",
    "mm": "mk,kn->mn",
    "bmm": "bmk,bkn->bmn",
    "addmm": "+,mk,kn->mn",
    "baddbmm": "+,bmk,bkn->bmn",
    "embedding": "*,vd->*d",
    "matmul": "*mk,*kn->*mn",
}
"""Letters name dimensions; `*` are those before them, aligned as in broadcasting; `+` are the last
ones of the result, as many as there are."""


def pointwise(num: int) -> str:
    """Of as many operands, each element with those at its place."""
    return f"{','.join('*' * num)}->*"


def labels(equation: str, ndims: list[int]) -> tuple[list[str], str] | None:
    """Names of the dimensions of operands and of the result; `None` if they do not fit.

    Args:
        equation: for these operands, and perhaps for more that were left out.
        ndims: number of dimensions of each operand.
    """
    given, result = equation.split("->")
    terms = given.split(",")[: len(ndims)]
    if len(terms) < len(ndims):
        return None
    if terms[0] == "+":
        terms[0] = result[len(result) - ndims[0] :]
    free = [ndim - len(term.replace("*", "")) for term, ndim in zip(terms, ndims, strict=True)]
    exact = all("*" in term or num == 0 for term, num in zip(terms, free, strict=True))
    if not exact or min(free) < 0:
        return None
    wide = string.ascii_uppercase[: max(free)]
    found = [
        term.replace("*", wide[len(wide) - num :]) for term, num in zip(terms, free, strict=True)
    ]
    return found, result.replace("*", wide)


def by_equation(
    at: Editor, node: fx.Node, equation: str, lead: fx.Node | None = None
) -> Result | None:
    """Cut a dimension of the result, and it alone, in all operands that have it."""
    operands = at.operands(node)
    found = labels(equation, [len(at.shape(each)) for each in operands])
    if found is None:
        return None
    terms, result = found
    for first, term in zip(operands, terms, strict=True):
        cut = at.cut(first)
        if cut is None or (lead is not None and first is not lead):
            continue
        label = term[cut.dim]
        if label in result and term.count(label) == 1:
            size = at.shape(first)[cut.dim]
            aligned = [
                at.aligned(each, Cut(its.index(label), cut.outer) if label in its else None, size)
                for each, its in zip(operands, terms, strict=True)
            ]
            at.set_operands(node, aligned)
            return node, Cut(result.index(label), cut.outer)
    return None
