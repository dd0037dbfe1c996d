"""Floating-point operations of the programs that are compiled, by module."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection
from typing import Any, ClassVar

from zerofx.cost.compute import num_flops
from zerofx.ir.edit import Editor
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass


@dataclasses.dataclass(frozen=True)
class Counted:
    """What one program computes.

    Attributes:
        region: forward or backward.
        params: the parameters it touches: handle of the layout, and name.
        operations: by path of the module whose forward made them.
    """

    region: Region
    params: tuple[tuple[int, str], ...]
    operations: tuple[tuple[str, int], ...]


@dataclasses.dataclass
class Counts:
    """Of each program of the same parameters, the version that was compiled last."""

    _latest: dict[Any, Counted] = dataclasses.field(default_factory=dict[Any, Counted], repr=False)

    def note(self, counted: Counted) -> None:
        """A program was compiled, perhaps anew."""
        self._latest[counted.region, counted.params] = counted

    def of(self, region: Region, handles: Collection[int]) -> collections.Counter[str]:
        """Operations by module, of models whose layouts have these handles."""
        found: collections.Counter[str] = collections.Counter()
        for counted in self._latest.values():
            if counted.region is region and any(each in handles for each, _ in counted.params):
                found.update(dict(counted.operations))
        return found


@dataclasses.dataclass(frozen=True)
class CountOperations(Pass):
    """Counts, and changes nothing.

    Attributes:
        counts: where to; pipelines with other ones are alike.
    """

    name: ClassVar[str] = "count_operations"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.BACKWARD))

    counts: Counts = dataclasses.field(default_factory=Counts, compare=False, repr=False)

    def plan(self, program: Program) -> Counted:
        """Operations of each module."""
        found: collections.Counter[str] = collections.Counter()
        for node in program.graph.nodes:
            if operations := num_flops(node):
                found[facts(node).module] += operations
        params = sorted((spec.layout.handle, name) for name, spec in program.params.items())
        lacks = _prefix(found, program.params)
        paths = ((f"{lacks}.{module}".strip("."), count) for module, count in found.items())
        return Counted(program.region, tuple(params), tuple(paths))

    def apply(self, edit: Editor, plan: Counted) -> None:
        """Say what was found."""
        self.counts.note(plan)


def _prefix(modules: Collection[str], params: Collection[str]) -> str:
    """What paths lack where a block is compiled alone: parameters bear their whole names."""
    if any(name.startswith(f"{module}.") for module in modules if module for name in params):
        return ""
    holders = zip(*(name.split(".")[:-1] for name in params), strict=False)
    shared = itertools.takewhile(lambda parts: len(set(parts)) == 1, holders)
    return ".".join(parts[0] for parts in shared)
