"""Follow the graphs of a program that compiles as always."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from zerofx.debug.captured import Break, break_of
from zerofx.frontend.dump import Finished
from zerofx.frontend.joint import copy_module
from zerofx.frontend.rehearsal import Rehearsal, buffer_bytes
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec
from zerofx.runtime.session import Session
from zerofx.torch_private import frame_being_compiled


@dataclasses.dataclass
class Texts:
    """A `Reader` that keeps what passes made of programs.

    Attributes:
        after: by region, the passes that ran with the text after each; the first is `traced`.
        reports: by region, the entry of `report.json`.
    """

    after: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict[str, Any])
    reports: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict[str, Any])

    def passed(self, region: str, stem: str, before: str, text: str) -> None:
        """Keep the text; a program that begins anew replaces the one before."""
        number, _, name = stem.partition("_")
        if int(number) == 0:
            self.after[region] = {}
        self.after[region][name] = text

    def finished(self, done: Finished) -> None:
        """Keep the report."""
        entries = done.report["programs"]
        self.reports[done.region] = next(e for e in entries if e["region"] == done.region)


class GraphRecord(Texts):
    """One Dynamo graph.

    Attributes:
        frame: which function Dynamo was compiling.
        num_ops: operations in Dynamo's graph.
        ends: where it breaks, if it does.
        rehearsal: its programs before their own passes; `None` without a backward.
        runs: how often its forward ran.
        nested: most of these runs before a backward of the model.
    """

    def __init__(self, module: fx.GraphModule, session: Session | None = None) -> None:
        super().__init__()
        self.frame = frame_being_compiled()
        self.num_ops = sum(n.op.startswith("call_") for n in module.graph.nodes)
        self.ends: Break | None = break_of(module)
        self.rehearsal: Rehearsal | None = None
        self.runs = self.nested = 0
        self._session = session
        self._row, self._backwards = 0, -1

    def ran(self) -> None:
        """Count its forward."""
        backwards = self._session.accumulation.begun if self._session is not None else 0
        self._row = self._row + 1 if backwards == self._backwards else 1
        self._backwards = backwards
        self.runs, self.nested = self.runs + 1, max(self.nested, self._row)

    def cut(self, forward: Program, backward: Program) -> None:
        """Keep copies of both halves."""
        session = self._session
        if session is None or not session.states:
            return
        params = tuple(state.spec for state in session.states)
        root = session.root()
        self.rehearsal = Rehearsal(
            _copied(forward),
            _copied(backward),
            _with(params, forward, backward),
            buffer_bytes(root) if root else 0,
            session.device,
            session.config.inner,
        )


@dataclasses.dataclass
class Recorder:
    """Records all graphs of one process; pass it to `watched_by`.

    Attributes:
        graphs: in order of compilation, of functions compiled again the last version alone.
        session: the first sharded model that was seen.
    """

    graphs: list[GraphRecord] = dataclasses.field(default_factory=list[GraphRecord])
    session: Session | None = None

    def __call__(self, module: fx.GraphModule, session: Session | None) -> GraphRecord:
        """A graph is about to be traced."""
        made = GraphRecord(module, session)
        self.session = self.session or session
        self.graphs.append(made)
        return made

    @property
    def training(self) -> list[GraphRecord]:
        """Graphs with a backward; of each function the version that was compiled last."""
        found = {each.frame: each for each in self.graphs if each.rehearsal is not None}
        return list(found.values())

    def count(self, steps: int) -> None:
        """Say of each of these how often a step ran it, all versions together.

        Args:
            steps: of all optimizers.
        """
        for last in self.training:
            versions = [each for each in self.graphs if each.frame == last.frame]
            runs = sum(each.runs for each in versions if each.rehearsal is not None)
            assert last.rehearsal is not None
            last.rehearsal = dataclasses.replace(
                last.rehearsal,
                runs=runs / steps if runs and steps else 1.0,
                nested=max(1, *(each.nested for each in versions)),
            )


def _copied(program: Program) -> Program:
    return dataclasses.replace(program, module=copy_module(program.module))


def _with(params: Sequence[ParamSpec], *programs: Program) -> tuple[ParamSpec, ...]:
    """All parameters of a model; names of programs that read several models are longer."""
    named = {spec.name: spec for spec in params}
    used = {name: spec for program in programs for name, spec in program.params.items()}
    return tuple(named.values()) if used.keys() <= named.keys() else tuple(used.values())
