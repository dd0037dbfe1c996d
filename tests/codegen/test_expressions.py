"""Index expressions lose what is always 0, and print as code that means the same."""

from __future__ import annotations

import pytest
import torch

from zerofx.codegen.emit import place_of
from zerofx.codegen.expressions import Scope, code
from zerofx.ir.parcels import Codec, Member, Parcels, place


@pytest.mark.parametrize(
    ("bound", "div", "mod"),
    [(12, "program // 5", "program % 5"), (5, "0", "program"), (1, "0", "0")],
)
def test_division(bound: int, div: str, mod: str) -> None:
    scope = Scope(program=bound)
    assert code(scope.div(scope["program"], 5)) == div
    assert code(scope.mod(scope["program"], 5)) == mod


@pytest.mark.parametrize(("local", "nodes"), [(2, 4), (1, 4), (4, 1), (3, 5), (1, 1)])
def test_printed_code_computes_the_place(local: int, nodes: int) -> None:
    scope, num = Scope(chunk=local * nodes), local * nodes
    member = Member("w", 32 * num, 32, torch.float32)
    row = place_of(scope["chunk"], scope, Parcels((member,), Codec(), num, nodes))
    for number in range(num):
        value = eval(code(row * 100 + 7), {"chunk": number})
        assert value == place(number, local, nodes) * 100 + 7


def test_largest_value() -> None:
    scope = Scope(chunk=4, tile=3, row=1)
    assert scope.largest(100 * scope["chunk"] + 7 * scope["tile"] + scope["row"]) == 314
