"""Peak memory in closed form: an expression in batch size and sequence length.

What is live at a node is a + b·B for each length, and a and b are polynomials of second degree in
the length: attention scores grow with its square, nothing grows faster. Three lengths tell them, as
long as all give the same program. The peak is the largest of all nodes; nodes that are never it,
whatever batch and length, are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import sympy  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

from zerofx.cost.forecast import Forecast
from zerofx.cost.lines import Line, check_alike

B: Any = sympy.Symbol("B", positive=True)
"""Micro-batch size of a rank."""
S: Any = sympy.Symbol("S", positive=True)
"""Sequence length."""

_TERMS = (sympy.Integer(1), S, S**2, B, B * S, B * S**2)
Terms = NDArray[np.float64]
"""Coefficients of `_TERMS`; float64 `[…, 6]`."""


def peak_expression(forecasts: Mapping[int, Forecast]) -> Any:
    """Bytes of a rank at the peak of a step, in `B` and `S`; exact for what only changes shapes.

    Args:
        forecasts: of the same model and stage, by sequence length; three.

    Raises:
        NotAlikeError: the programs depend on the length by more than their shapes.
    """
    lengths, found = list(forecasts), list(forecasts.values())
    resident, always = found[0].resident, found[0].always
    grads = int(resident.states.grads)
    phases = [
        _terms([each.forward for each in found], lengths),
        _terms([each.backward for each in found], lengths),
    ]
    points = np.concatenate([phase.sum(axis=1) for phase in phases])
    points[:, 0] += resident.standing
    lasting = np.array([each.lasting for each in found])
    step = _through(lasting[None], lengths)
    step[:, 0] += grads + resident.step
    return always + _largest(np.concatenate([points, step]))


def _terms(lines: Sequence[Line], lengths: Sequence[int]) -> Terms:
    """Of each node and column, `[nodes, 4, 6]`."""
    for line in lines[1:]:
        check_alike(lines[0].nodes, line.nodes)
    values = np.stack([np.stack([line.base, line.slope], axis=-1) for line in lines], axis=-2)
    return _through(values, lengths)


def _through(values: NDArray[np.float64], lengths: Sequence[int]) -> Terms:
    """Coefficients from values `[…, length, (base, slope)]`, by divided differences.

    Bytes are whole numbers, and so are all steps on the way to whole coefficients: nothing rounds.
    """
    (a, b, c), (at_a, at_b, at_c) = lengths, np.moveaxis(values, -2, 0)
    first, second = (at_b - at_a) / (b - a), (at_c - at_b) / (c - b)
    square = (second - first) / (c - a)
    linear = first - square * (a + b)
    constant = at_a - linear * a - square * a**2
    return np.stack([constant, linear, square], axis=-1).reshape(*values.shape[:-2], 6)


def _largest(points: Terms) -> Any:
    """The maximum of polynomials, those that are never the largest left out."""
    kept: list[Terms] = []
    for point in sorted(np.unique(points, axis=0), key=lambda each: -each.sum()):
        if not any(_cover(one, one, point) for one in kept):
            kept.append(point)
    for point in list(kept):
        others = [each for each in kept if each is not point]
        if any(_cover(one, two, point) for one, two in itertools.combinations(others, 2)):
            kept = others
    largest: list[Any] = [_polynomial(each) for each in kept]
    if len(largest) == 1:
        return largest[0]
    top: Any = sympy.Max
    return top(*largest, evaluate=False)


def _cover(one: Terms, two: Terms, other: Terms) -> bool:
    """Whether a mean of two polynomials, weighted somehow, is nowhere less than the other one.

    Nowhere is where B and S are at least 1. With B = 1 + x and S = 1 + y, a polynomial is at least
    0 there if none of its coefficients is negative.
    """
    least, most = 0.0, 1.0
    for mine, yours in zip(_shifted(one - other), _shifted(two - other), strict=True):
        slope = mine - yours
        if slope > 0:
            least = max(least, -yours / slope)
        elif slope < 0:
            most = min(most, -yours / slope)
        elif yours < 0:
            return False
    return least <= most


def _shifted(terms: Terms) -> tuple[float, ...]:
    c, s, ss, b, bs, bss = map(float, terms)
    return (
        c + s + ss + b + bs + bss,
        s + 2 * ss + bs + 2 * bss,
        ss + bss,
        b + bs + bss,
        bs + 2 * bss,
        bss,
    )


def _polynomial(terms: Iterable[float]) -> Any:
    pairs = zip(terms, _TERMS, strict=True)
    return sum(
        ((sympy.Integer(int(c)) if c == int(c) else sympy.Float(c)) * term for c, term in pairs),
        start=sympy.Integer(0),
    )
