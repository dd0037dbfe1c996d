"""Dynamo's words become a reason and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerofx.debug.captured import failed, recompiles
from zerofx.torch_private import Compilation


def compilation(recompiled: str = "", failure: str = "") -> Compilation:
    return Compilation("forward", __file__, 3, recompiled, failure, (__file__, 5), 0.5)


@pytest.mark.parametrize(
    ("reason", "said", "remedy"),
    [
        ("0/0: tensor 'x' size mismatch at index 0. expected 4, actual 5", "expected 4", "dynamic"),
        ("1/2: GLOBAL_STATE changed: grad_mode", "grad_mode", "nothing to do"),
        ("0/1: self.number == 3", "self.number == 3", "as a tensor"),
    ],
)
def test_recompiles(reason: str, said: str, remedy: str) -> None:
    (found,) = recompiles([compilation(reason), compilation()])
    assert said in found.reason and remedy in found.remedy and "/" not in found.reason[:3]
    assert found.place.line == 3 and found.seconds == 0.5


def test_functions_that_are_not_compiled() -> None:
    why = "Odd thing\n  Explanation: it is odd\n  Hint: do this\n  Hint: Please report an issue"
    (found,) = failed([compilation(), compilation(failure=why)])
    assert found.reason == "forward is not compiled at all: Odd thing. it is odd"
    assert found.remedy == "do this" and found.place.line == 5
    assert found.place.code == Path(__file__).read_text().splitlines()[4].strip()
