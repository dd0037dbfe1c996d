"""The programs of a step's micro-batches, where later ones differ from the first."""

from __future__ import annotations

import dataclasses

from zerofx.frontend.joint import copy_module
from zerofx.ir.edit import Editor
from zerofx.ir.program import Program
from zerofx.passes.add_secondary_shards import AddSecondaryShards


def programs_of_micro_batches(program: Program, number: int) -> list[tuple[Program, int]]:
    """What the micro-batches of a step run instead of `program`, and how many of them do.

    Secondary shards are there after the first one, so that gathers of later forwards send nothing
    across nodes. `program` itself is never changed.

    Args:
        program: of the first one, after all passes.
        number: of micro-batches.
    """
    if number == 1 or not AddSecondaryShards.there_later(program):
        return [(program, number)]
    later = dataclasses.replace(program, module=copy_module(program.module))
    edit = Editor(later, AddSecondaryShards.name)
    AddSecondaryShards.stay_inside(edit, AddSecondaryShards.there_later(later))
    return [(program, 1), (later, number - 1)]
