"""Each pass makes the text that its golden files hold; its docstring shows the case `doc`."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest

from tests.passes.golden import FOLDER, apply, check_golden, golden_halves
from tests.passes.secondary_cases import ALL_CASES as CASES
from zerofx.ir.text import print_program
from zerofx.ir.verify import verify
from zerofx.passes.base import Pass

_NAMES = sorted({name for name, _ in CASES})


@pytest.mark.parametrize(("name", "case"), CASES, ids="/".join)
def test_pass_makes_the_golden_text(name: str, case: str) -> None:
    each, build = CASES[name, case]
    program = build()
    before = print_program(program)
    apply(program, each)
    check_golden(name, case, before, program)
    verify(program, [name])


@pytest.mark.parametrize(("name", "case"), CASES, ids="/".join)
def test_plan_is_pure(name: str, case: str) -> None:
    each, build = CASES[name, case]
    program = build()
    before = print_program(program)
    assert repr(each.plan(program)) == repr(each.plan(program))
    assert print_program(program) == before


def test_every_golden_file_has_a_case() -> None:
    files = {(path.parent.name, path.stem) for path in FOLDER.glob("*/*.txt")}
    assert files == set(CASES)


@pytest.mark.parametrize("name", _NAMES)
def test_docstring_shows_the_case_doc(name: str) -> None:
    """The docstring's lines hold the same zerofx ops as the golden text, before and after."""
    each, _ = CASES[name, "doc"]
    shown = re.search(r"Before:\n(.*?)\n\s*After:\n(.*)", inspect.getdoc(type(each)) or "", re.S)
    assert shown, f"{type(each).__name__} has no Before and After"
    for text, golden in zip(shown.groups(), golden_halves(name, "doc"), strict=True):
        assert _zerofx_ops(text) <= _zerofx_ops(golden)
        assert sum(_zerofx_ops(golden).values()) - sum(_zerofx_ops(text).values()) <= 1


@pytest.mark.parametrize("name", _NAMES)
def test_file_and_class_bear_the_pass_name(name: str) -> None:
    kind: type[Pass] = type(CASES[name, "doc"][0])
    assert kind.__module__ == f"zerofx.passes.{name}" and kind.name == name
    assert kind.__name__ == "".join(word.title() for word in name.split("_"))


def _zerofx_ops(text: str) -> Counter[str]:
    words = r"\b(unshard|reduce_grad|unshard_start|unshard_wait|free|keep|keep_shard|reduce_start|"
    return Counter(re.findall(words + r"reduce_wait|sync_buffers|clone)\(", text))
