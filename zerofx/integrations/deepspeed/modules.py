"""A model's modules, with their parameters and what they compute."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer

from zerofx.integrations.deepspeed.operations import Counts
from zerofx.ir.spec import Region
from zerofx.runtime.handles import live_sessions
from zerofx.runtime.ownership import states_of
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.params import params_of
from zerofx.runtime.session import Session


@dataclasses.dataclass(frozen=True)
class Model:
    """One sharded model.

    Attributes:
        kinds: classes of its modules by path, in order; that of the model itself is empty.
        numels: elements of its parameters, by all names of each.
        held: elements of them that this rank holds.
        forward: operations of a micro-batch by module.
        backward: the same.
    """

    kinds: Mapping[str, str]
    numels: Mapping[tuple[str, ...], int]
    held: int
    forward: collections.Counter[str]
    backward: collections.Counter[str]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(self.numels.values())

    def classes(self, depth: int, top: int) -> list[str]:
        """Lines about the classes that compute most at each depth.

        Args:
            depth: the last one; -1: all.
            top: classes of each.
        """
        numels, flops = self._numels_inside(), self._flops_inside()
        rows = [("depth", "class", "modules", "parameters", "FLOP", "share")]
        deepest = max(map(_depth, self.kinds))
        for level in range((deepest if depth < 0 else min(depth, deepest)) + 1):
            grouped: dict[str, list[str]] = {}
            for path, kind in self.kinds.items():
                if _depth(path) == level:
                    grouped.setdefault(kind, []).append(path)
            figures = [
                (sum(flops[path] for path in paths), sum(numels[path] for path in paths), kind)
                for kind, paths in grouped.items()
            ]
            rows += [
                (str(level), kind, str(len(grouped[kind])), *_cells(numel, count, flops[""]))
                for count, numel, kind in sorted(figures, reverse=True)[:top]
            ]
        return aligned(rows, texts=(0, 1))

    def tree(self) -> list[str]:
        """Lines about all modules, each below the one that holds it."""
        numels, flops = self._numels_inside(), self._flops_inside()
        rows = [("module", "class", "parameters", "FLOP", "share")]
        for path, kind in self.kinds.items():
            name = "  " * _depth(path) + (path.rpartition(".")[2] or "(model)")
            rows.append((name, kind, *_cells(numels[path], flops[path], flops[""])))
        return aligned(rows, texts=(0, 1))

    def _numels_inside(self) -> collections.Counter[str]:
        """Elements by module, with those of the modules in it; of tied names all count."""
        found: collections.Counter[str] = collections.Counter()
        for names, numel in self.numels.items():
            holders = {holder for name in names for holder in _holders(name)}
            found.update(dict.fromkeys(holders, numel))
        return found

    def _flops_inside(self) -> collections.Counter[str]:
        """Operations by module, with those of the modules in it."""
        found: collections.Counter[str] = collections.Counter()
        for module, flops in (self.forward + self.backward).items():
            found.update(dict.fromkeys({module, *_holders(module)}, flops))
        return found


def models_of(optimizer: Optimizer, counts: Counts) -> list[Model]:
    """The sharded models whose parameters an optimizer has."""
    params = params_of(optimizer)
    return [
        _model(session, counts) for session in live_sessions() if states_of(params, session.states)
    ]


def _model(session: Session, counts: Counts) -> Model:
    root = session.root()
    named: Iterable[tuple[str, Any]] = () if root is None else root.named_modules()
    specs = [state.spec for state in session.states]
    handles = {spec.layout.handle for spec in specs}
    return Model(
        kinds={"": "model", **{path: type(module).__name__ for path, module in named}},
        numels={(spec.name, *spec.tied): spec.numel for spec in specs},
        held=sum(local_tensor(state.param).numel() for state in session.states),
        forward=counts.of(Region.FORWARD, handles),
        backward=counts.of(Region.BACKWARD, handles),
    )


def _cells(numel: int, flops: int, whole: int) -> tuple[str, str, str]:
    return f"{numel:,}", f"{flops:,}", f"{100 * flops / (whole or 1):.1f}%"


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _holders(path: str) -> list[str]:
    """The modules that a module or parameter is in, the model among them."""
    parts = path.split(".")
    return [".".join(parts[:number]) for number in range(len(parts))]


def aligned(rows: list[tuple[str, ...]], texts: tuple[int, ...]) -> list[str]:
    """Rows as lines; columns are numbers, which end alike, but for `texts`."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in texts else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
