"""Golden text: what a pass makes of a program, before and after.

`ZEROFX_UPDATE_GOLDEN=1 pytest tests/passes` writes the files anew; read the diff before committing.
"""

from __future__ import annotations

import os
from pathlib import Path

from zerofx.ir.edit import Editor
from zerofx.ir.program import Program
from zerofx.ir.text import print_program
from zerofx.passes.base import Pass

FOLDER = Path(__file__).parent.parent / "golden"
_RULE = "-" * 20 + " after {name}\n"


def apply(program: Program, each: Pass) -> None:
    """One pass, without the checks around it."""
    edit = Editor(program, each.name)
    each.apply(edit, each.plan(program))
    edit.finish()


def golden_path(name: str, case: str) -> Path:
    return FOLDER / name / f"{case}.txt"


def check_golden(name: str, case: str, before: str, program: Program) -> None:
    """Compare with the file, or write it."""
    found = before + _RULE.format(name=name) + print_program(program)
    path = golden_path(name, case)
    if os.environ.get("ZEROFX_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert path.exists(), f"no {path}: run with ZEROFX_UPDATE_GOLDEN=1"
    assert found == path.read_text()


def golden_halves(name: str, case: str) -> tuple[str, str]:
    """The text before and after the pass."""
    before, _, after = golden_path(name, case).read_text().partition(_RULE.format(name=name))
    return before, after
