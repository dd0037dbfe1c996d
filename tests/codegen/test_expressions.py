"""Index expressions lose what is always 0, and print as code that means the same."""

from __future__ import annotations

import pytest

from zerofx.codegen.expressions import Scope, code


@pytest.mark.parametrize(
    ("bound", "div", "mod"),
    [(12, "program // 5", "program % 5"), (5, "0", "program"), (1, "0", "0")],
)
def test_division(bound: int, div: str, mod: str) -> None:
    scope = Scope(program=bound)
    assert code(scope.div(scope["program"], 5)) == div
    assert code(scope.mod(scope["program"], 5)) == mod


@pytest.mark.parametrize(("local", "nodes"), [(2, 4), (1, 4), (4, 1), (3, 5)])
def test_printed_code_computes_the_expression(local: int, nodes: int) -> None:
    scope = Scope(chunk=local * nodes)
    chunk = scope["chunk"]
    place = scope.mod(chunk, local) * nodes + scope.div(chunk, local)
    for number in range(local * nodes):
        value = eval(code(place * 100 + 7), {"chunk": number})
        assert value == (number % local * nodes + number // local) * 100 + 7


def test_largest_value() -> None:
    scope = Scope(chunk=4, tile=3, row=1)
    assert scope.largest(100 * scope["chunk"] + 7 * scope["tile"] + scope["row"]) == 314
