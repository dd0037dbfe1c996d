"""Rules about what leaves a program: nobody may hold the memory of a full value."""

from __future__ import annotations

from collections.abc import Iterator

from torch import SymInt, Tensor

from zerofx.ir.case import Case, Offence
from zerofx.ir.spec import Region

SMALL_NUMEL = 1024
"""Values computed from parameters alone may be saved for backward up to this many elements."""


def nothing_full_saved(case: Case) -> Iterator[Offence]:
    """Stage 3: nothing saved for backward is, or views, a full parameter."""
    for node in case.saved:
        for full in case.roots.get(node, ()):
            if full in case.gathered:
                yield Offence(
                    node, f"is saved for backward and is or views {case.name(full)}", full
                )
        value = node.meta.get("val")
        if node in case.derived and isinstance(value, Tensor) and is_large(value):
            yield Offence(node, "is saved for backward and is computed from full parameters alone")


def nothing_full_returned(case: Case) -> Iterator[Offence]:
    """The memory of a full value is freed or refreshed, so it does not leave a program."""
    if case.program.region is Region.JOINT or not (case.final or "copy_returned" in case.done):
        return
    for node in case.program.returned:
        for full in case.roots.get(node, ()):
            yield Offence(node, f"is returned to the user and is or views {case.name(full)}", full)


def is_large(value: Tensor) -> bool:
    """Whether a value is more than a few elements, or may be."""
    return any(isinstance(size, SymInt) for size in value.shape) or value.numel() > SMALL_NUMEL
