"""The verifier: checks after every pass that a program keeps the rules, in linear time."""

from __future__ import annotations

from collections.abc import Sequence

from zerofx.errors import VerificationError
from zerofx.ir.border import Border
from zerofx.ir.case import Case
from zerofx.ir.facts import facts
from zerofx.ir.meaning import Meanings
from zerofx.ir.program import Program
from zerofx.ir.rules import RULES, Offence, Rule
from zerofx.ir.text import node_names


def verify(
    program: Program,
    done: Sequence[str],
    *,
    final: bool = False,
    budget_bytes: int | None = None,
    meanings: Meanings | None = None,
    border: Border | None = None,
) -> None:
    """Check every rule.

    Args:
        program: left as it is.
        done: names of the passes that ran on it.
        final: no pass follows.
        budget_bytes: most bytes of full values that may be live at once.
        meanings: what the program meant before its last pass, and must mean still; renewed.
        border: what its callers gave and took before its last pass.

    Raises:
        VerificationError: names the rule, and of each offence parameter, module, node and pass.
    """
    case = Case(program, frozenset(done), final, budget_bytes, meanings, border)
    for rule in RULES:
        offences = list(rule.check(case))
        if offences:
            raise _error(rule, offences, program, done)


def peak_full_bytes(program: Program) -> int:
    """Most bytes of gathered values that are live at once, from start of a gather to its free."""
    return Case(program).peak()[0]


def _error(
    rule: Rule, offences: list[Offence], program: Program, done: Sequence[str]
) -> VerificationError:
    names = node_names(program)
    first, *others = [_sentence(each, names[each.node]) for each in offences]
    after = f"after pass {done[-1]}" if done else "before any pass"
    law = " ".join((rule.check.__doc__ or "").split())
    problem = f"{program.region.value} program, {after}: {first}. Rule: {law}"
    return VerificationError(rule.name, problem, rule.remedy, others)


def _sentence(offence: Offence, name: str) -> str:
    records = [facts(node) for node in (offence.node, offence.about) if node is not None]
    param = next((record.param for record in reversed(records) if record.param), "")
    module = next((record.module for record in records if record.module), "")
    where = (
        f" ({word} {text})" for word, text in (("parameter", param), ("module", module)) if text
    )
    return f"{name} {offence.problem}{''.join(where)}"
