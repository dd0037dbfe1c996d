"""Pairwise covers: few rows in which every pair of values of two factors occurs together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def pairwise(
    factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool] = lambda row: True
) -> list[Row]:
    """Rows, the same every time: greedily the one that holds most pairs not seen yet.

    Args:
        factors: values of each factor.
        allowed: only these rows, and the pairs they hold, count.
    """
    every = itertools.product(*factors.values())
    rows = [row for values in every if allowed(row := dict(zip(factors, values, strict=True)))]
    missing = set().union(*map(_pairs, rows))
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(_pairs(row) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(row: Row) -> set[tuple[Any, ...]]:
    return set(itertools.combinations(row.items(), 2))
