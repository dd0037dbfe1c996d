"""What a pass is, and how a list of passes is run."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from zerofx.errors import PassError, VerificationError, ZeroFxError
from zerofx.ir.border import Border
from zerofx.ir.edit import Editor
from zerofx.ir.meaning import Meanings
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.verify import verify

Numerics = Literal["exact", "reordered", "lossy"]

RUNNING = frozenset((Region.FORWARD, Region.BACKWARD, Region.INFERENCE))
"""The programs that run."""

Observer = Callable[[Program, str, Any], None]
"""Called after every pass with the program, the pass's name and its plan."""


@dataclasses.dataclass(frozen=True)
class Pass(abc.ABC):
    """One transformation. A subclass is a frozen dataclass; its fields are its options.

    `plan` is pure and returns printable data; `apply` edits through the one editing door. A pass
    never runs the model, touches a device or calls a collective, and decides alike on every rank.
    How to write one: docs/passes.md.

    Attributes:
        name: how users, errors and dumps call it; one word of a pipeline.
        regions: the programs it works on.
        numerics: what it may do to numbers: nothing, change the order of a sum, or round.
        mandatory: whether a program without it would be wrong.
        replaces: whether it puts other operations in the place of the model's. Without, all that
            leaves a program must be made by the same ones from the same values as before.
    """

    name: ClassVar[str]
    regions: ClassVar[frozenset[Region]]
    numerics: ClassVar[Numerics] = "exact"
    mandatory: ClassVar[bool] = False
    replaces: ClassVar[bool] = False

    @abc.abstractmethod
    def plan(self, program: Program) -> Any:
        """Decide; frozen, printable data."""

    @abc.abstractmethod
    def apply(self, edit: Editor, plan: Any) -> None:
        """Carry the plan out."""

    def budget_of(self, plan: Any) -> int | None:
        """Most bytes of gathered values at once, a bound for all later passes; `None`: none."""
        return None


def run_passes(
    program: Program,
    passes: Sequence[Pass],
    *,
    check: bool = True,
    observer: Observer | None = None,
) -> None:
    """Run the passes that apply to the program's region, in order.

    Args:
        program: transformed in place.
        passes: the list.
        check: verify the program after every pass, and its final form at the end.
        observer: called after every pass, before it is verified.

    Raises:
        VerificationError: a pass broke a rule.
        PassError: a pass failed, or refused the program; names the passes that already ran.
    """
    done: list[str] = []
    meanings = Meanings(program) if check else None
    border = Border.of(program) if check else None
    budget: int | None = None
    for each in passes:
        if program.region not in each.regions:
            continue
        edit = Editor(program, each.name)
        try:
            plan = each.plan(program)
            each.apply(edit, plan)
            edit.finish()
        except Exception as error:
            raise _failure(each, program, done, error) from error
        done.append(each.name)
        if observer is not None:
            observer(program, each.name, plan)  # who is refused next can be read, too
        if meanings is None:
            continue
        stated, same = each.budget_of(plan), None if each.replaces else meanings
        budget = budget if stated is None else stated
        try:
            verify(program, done, budget_bytes=budget, meanings=same, border=border)
            meanings = Meanings(program) if each.replaces else meanings
            border = Border.of(program)
        except VerificationError:
            raise
        except Exception as error:  # the graph is none any more
            raise _failure(each, program, done[:-1], error) from error
    if check:
        verify(program, done, final=True, budget_bytes=budget)


def _failure(each: Pass, program: Program, done: Sequence[str], error: Exception) -> PassError:
    before = [f"ran before it: {name}" for name in done]
    if isinstance(error, ZeroFxError):  # it says itself what to do
        problem = f"pass {each.name} refuses the {program.region.value} program: {error.problem}"
        return PassError(problem, error.remedy, [*error.offenders, *before])
    module = type(each).__module__
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    remedy = "report this" if ours else f"repair {type(each).__qualname__} in {module}"
    if not each.mandatory:
        remedy = f"disable it with options={{'disable': ('{each.name}',)}} and {remedy}"
    return PassError(
        f"pass {each.name} failed on the {program.region.value} program: "
        f"{type(error).__name__}: {error}",
        remedy,
        before,
    )
