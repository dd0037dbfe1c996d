"""Index expressions: sympy simplifies them, and they print as code.

Every symbol is an integer from 0 up to a bound, so an expression has a largest value: divisions
that give 0 vanish, and whether 32 bits are enough is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from sympy.printing.str import StrPrinter

Expr = Any
"""A sympy expression, or an int; sympy is untyped."""


class Scope:
    """Symbols and their bounds.

    Args:
        bounds: for each name, how many values it has: 0 up to one less.
    """

    def __init__(self, **bounds: int) -> None:
        self._symbols = {name: sympy.Symbol(name, integer=True) for name in bounds}
        self._bounds: Mapping[Expr, int] = {
            self._symbols[name]: bound for name, bound in bounds.items()
        }

    def __getitem__(self, name: str) -> Expr:
        """The symbol `name`; 0 if it can be nothing else."""
        symbol = self._symbols[name]
        return symbol if self._bounds[symbol] > 1 else sympy.Integer(0)

    def largest(self, expr: Expr) -> int:
        """Largest value of a sum of products with positive factors."""
        last = {symbol: max(bound - 1, 0) for symbol, bound in self._bounds.items()}
        return int(sympy.sympify(expr).subs(last))

    def div(self, expr: Expr, by: int) -> Expr:
        """Quotient, rounded down."""
        return sympy.floor(expr / sympy.Integer(by)) if self.largest(expr) >= by else 0

    def mod(self, expr: Expr, by: int) -> Expr:
        """Remainder."""
        return sympy.Mod(expr, by) if self.largest(expr) >= by else expr


def code(expr: Expr) -> str:
    """`expr` as Python and Triton both write it."""
    text = _Printer().doprint(sympy.sympify(expr))
    return text[1:-1] if isinstance(expr, sympy.floor) else text


def shifted(name: str, shift: Expr) -> str:
    """`name`, and as much more as `shift` says, as code."""
    return name if shift == 0 else f"{name} + {code(shift)}"


class _Printer(StrPrinter):
    def _print_floor(self, expr: Expr) -> str:
        over, under = expr.args[0].as_numer_denom()
        return f"({self.doprint(over)} // {self.doprint(under)})"

    def _print_Mod(self, expr: Expr) -> str:
        return f"{self.doprint(expr.args[0])} % {self.doprint(expr.args[1])}"
