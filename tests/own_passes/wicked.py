"""The module of a package that is installed for tests: passes good and bad.

Its entry point `wicked` holds `chosen`, and the environment variable WICKED says which.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import zerofx
from zerofx.passes import Editor, Facts, Program, Region, facts, ops

SEEN: list[str] = []


class Wicked(zerofx.Pass):
    """Works on forward programs."""

    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD,))


@dataclasses.dataclass(frozen=True)
class Look(Wicked):
    """Notes what it sees, and edits nothing."""

    name: ClassVar[str] = "look"

    def plan(self, program: Program) -> tuple[str, ...]:
        return tuple(facts(start).param for start in program.calls(ops.UNSHARD_START))

    def apply(self, edit: Editor, plan: tuple[str, ...]) -> None:
        SEEN.extend(plan)


@dataclasses.dataclass(frozen=True)
class FreeEarly(Wicked):
    """Frees every parameter right after its gather."""

    name: ClassVar[str] = "free_early"

    def plan(self, program: Program) -> Any:
        return tuple(program.calls(ops.FREE))

    def apply(self, edit: Editor, plan: Any) -> None:
        for free in plan:
            edit.move_after(free, free.args[0])


@dataclasses.dataclass(frozen=True)
class SwapGathers(Wicked):
    """Gathers the second parameter before the first one, on one rank: it asks which rank it is."""

    name: ClassVar[str] = "swap_gathers"

    def plan(self, program: Program) -> Any:
        if dist.get_rank() == 0:
            return ()
        first, second = program.calls(ops.UNSHARD_START)[:2]
        return first, second, ops.waits_of(second)[0]

    def apply(self, edit: Editor, plan: Any) -> None:
        if plan:
            first, start, wait = plan
            edit.move_before(start, first)
            edit.move_before(wait, first)


@dataclasses.dataclass(frozen=True)
class Scale(Wicked):
    """Multiplies the loss: what it does is seen in the numbers."""

    factor: float = 2.0

    name: ClassVar[str] = "scale"
    replaces: ClassVar[bool] = True

    def plan(self, program: Program) -> Any:
        return program.outputs[0]

    def apply(self, edit: Editor, plan: Any) -> None:
        product = edit.call_after(plan, torch.ops.aten.mul.Tensor, (plan, self.factor), Facts())
        edit.set_input(edit.program.output, plan, product)


CHOICES: dict[str, Any] = {
    "look": Look,
    "free early": lambda: zerofx.after("insert_frees", FreeEarly()),
    "swap gathers": lambda: zerofx.before("schedule", SwapGathers()),
    "replace frees": lambda: zerofx.replace("insert_frees", Look()),
    "no pass": lambda: "no pass",
    "two": lambda: [zerofx.without("schedule"), Look()],
}


def chosen() -> Any:
    """What the environment asks for."""
    return CHOICES[os.environ["WICKED"]]()
