"""Rules about what programs compute: passes change when and how bytes move, and nothing else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

from zerofx.ir.border import Border, look
from zerofx.ir.case import Case, Offence
from zerofx.ir.meaning import Value
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.text import operation

_DEPTH = 2


def same_values(case: Case) -> Iterator[Offence]:
    """All that leaves a program is made by the same operations from the same values as before."""
    if case.meanings is None:
        return
    before, after = case.meanings.renewed(case.program)
    for place, (was, now) in enumerate(itertools.zip_longest(before.outputs, after.outputs)):
        if was != now:
            problem = f"returns {called(case.program, place)} as {difference(was, now)}"
            yield Offence(case.program.output, problem)
    for was, now in itertools.zip_longest(before.effects, after.effects):
        if was != now:
            problem = f"follows on other random or impure operations: {difference(was, now)}"
            yield Offence(case.program.output, problem)
            return


def same_border(case: Case) -> Iterator[Offence]:
    """Inputs, saved values and gradients keep their places; whatever is in them, their looks."""
    if case.border is None:
        return
    before, now, program = case.border, Border.of(case.program), case.program
    for was, new in itertools.zip_longest(before.inputs, now.inputs):
        if was is not new:
            problem = f"is where input {was.name} was" if was else "is an input that nobody gives"
            yield Offence(new or program.output, problem if new else f"misses input {was.name}")
            return
    if len(before.outputs) != len(now.outputs):
        counts = f"{len(now.outputs)} saved values or gradients instead of {len(before.outputs)}"
        yield Offence(program.output, f"returns {counts}")
        return
    if case.meanings is not None:
        return  # `same_values` sees more
    for place, (was, new) in enumerate(zip(before.outputs, now.outputs, strict=True), now.first):
        if was is not new and (wanted := look(was)) != (found := look(new)):
            problem = f"returns {called(program, place)} as {found} instead of {wanted}"
            yield Offence(program.output, problem)


def called(program: Program, place: int) -> str:
    """An output of a program in words."""
    if program.region is Region.BACKWARD:
        param = program.gradients_of[place] if place < len(program.gradients_of) else ""
        return f"the gradient of {param}" if param else f"gradient {place}"
    rest = place - program.num_user_outputs
    if rest < 0:
        return f"output {place}"
    return f"gradient {rest}" if program.region is Region.JOINT else f"saved value {rest}"


def difference(was: Any, now: Any) -> str:
    """The first that an operation was given and is another one now."""
    while isinstance(was, Value) and isinstance(now, Value):
        if was.op != now.op or was.op == "input" or len(was.given) != len(now.given):
            break
        pairs = zip(was.given, now.given, strict=True)
        was, now = next((old, new) for old, new in pairs if old != new)
    return f"{_text(now, _DEPTH)} instead of {_text(was, _DEPTH)}"


def _text(value: Any, depth: int) -> str:
    """A value in the words of printed programs, down to some depth."""
    if isinstance(value, tuple):
        parts = cast("tuple[Any, ...]", value)
        if parts and isinstance(parts[0], type):  # a constant, and its type
            return str(parts[1])
        return f"[{', '.join(_text(part, depth) for part in parts)}]"
    if not isinstance(value, Value):
        return "nothing" if value is None else str(value)
    if value.op == "input":
        return str(value.given[1] or value.given[0])
    if value.op == "once":
        return f"{_text(value.given[0], depth)}, named {value.given[1]}"
    given = ", ".join(_text(part, depth - 1) for part in value.given) if depth else "…"
    return f"{value.op if isinstance(value.op, str) else operation(value.op)}({given})"
