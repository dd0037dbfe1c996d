"""Write programs as text while passes transform them: one file a pass, and what it changed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from zerofx.ir.program import Program
from zerofx.ir.text import diff, print_program


class Dump:
    """Writes `directory/graph<N>/<region>/`: `000_traced.txt`, then `.txt` and `.diff` a pass.

    Args:
        directory: made if needed; older files stay unless they have the same name.
        number: which Dynamo graph of this process.
    """

    def __init__(self, directory: str, number: int) -> None:
        self._root = Path(directory) / f"graph{number}"
        self._before: dict[str, str] = {}
        self._counts: dict[str, itertools.count[int]] = {}

    def __call__(self, program: Program, name: str, plan: Any) -> None:
        """Write `program` as the pass `name` left it."""
        folder = self._root / program.region.value
        folder.mkdir(parents=True, exist_ok=True)
        count = self._counts.setdefault(program.region.value, itertools.count())
        stem = f"{next(count):03d}_{name}"
        text = print_program(program)
        (folder / f"{stem}.txt").write_text(text)
        before = self._before.get(program.region.value)
        if before is not None:
            (folder / f"{stem}.diff").write_text(diff(before, text))
        self._before[program.region.value] = text
