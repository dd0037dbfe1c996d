"""Follow the graphs of a program that compiles as always."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import fx

from zerofx.debug.captured import Break, Captured, recompiles
from zerofx.frontend.dump import Finished
from zerofx.frontend.joint import copy_module
from zerofx.frontend.layouts import buffer_bytes
from zerofx.frontend.partition import Traced
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec
from zerofx.runtime.session import Session
from zerofx.torch_private import Compilation, frame_being_compiled, why_graph_ended


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


class GraphRecord:
    """One Dynamo graph.

    Attributes:
        frame: which function Dynamo was compiling.
        session: the sharded model that it belongs to, if it does.
        num_ops: operations in Dynamo's graph.
        ended: Dynamo's words and the user's frames where it breaks; no words if it does not.
        rehearsal: its program before any pass; `None` without a backward.
        runs: how often its forward ran.
        nested: most of these runs before a backward of the model.
    """

    def __init__(self, module: fx.GraphModule, session: Session | None = None) -> None:
        self.frame = frame_being_compiled()
        self.num_ops = sum(n.op.startswith("call_") for n in module.graph.nodes)
        self.ended = why_graph_ended(module)
        self.rehearsal: Rehearsal | None = None
        self.runs = self.nested = 0
        self.session = session
        self._row, self._backwards = 0, -1

    def ran(self) -> None:
        """Count its forward."""
        backwards = self.session.accumulation.begun if self.session is not None else 0
        self._row = self._row + 1 if backwards == self._backwards else 1
        self._backwards = backwards
        self.runs, self.nested = self.runs + 1, max(self.nested, self._row)

    def is_version_of(self, other: GraphRecord) -> bool:
        """Whether both are the same function of the same parameters, compiled again.

        Models of one class, and blocks of one that are compiled alone, share their functions.
        """
        mine, theirs = self.rehearsal, other.rehearsal
        if mine is None or theirs is None or self.frame != other.frame:
            return False
        same_model = self.session is other.session
        reads = [each.traced.program.params.keys() for each in (mine, theirs)]
        return same_model and reads[0] == reads[1]

    def traced(self, traced: Traced) -> None:
        """Keep a copy."""
        session = self.session
        if session is None or not session.states:
            return
        params = tuple(state.spec for state in session.states)
        root = session.root()
        program = traced.program
        copied = dataclasses.replace(program, module=copy_module(program.module))
        self.rehearsal = Rehearsal(
            dataclasses.replace(traced, program=copied),
            _with(params, program),
            buffer_bytes(root) if root else 0,
            session.device,
            session.config.inner,
        )


@dataclasses.dataclass
class Recorder:
    """Records all graphs of one process; pass it to `watched_by`.

    Attributes:
        started: all that a backend was given, in order; Dynamo may begin one again.
        session: the first sharded model that was seen.
    """

    started: list[GraphRecord] = dataclasses.field(default_factory=list[GraphRecord])
    session: Session | None = None

    def __call__(self, module: fx.GraphModule, session: Session | None) -> GraphRecord:
        """A graph is about to be traced."""
        made = GraphRecord(module, session)
        self.session = self.session or session
        self.started.append(made)
        return made

    @property
    def graphs(self) -> list[GraphRecord]:
        """Those that ran."""
        return [each for each in self.started if each.runs]

    @property
    def forwards(self) -> int:
        """How often graphs with a backward ran."""
        return sum(each.runs for each in self.graphs if each.rehearsal is not None)

    @property
    def training(self) -> list[GraphRecord]:
        """Graphs with a backward, of models that have the first one's options.

        Of each function and its parameters the version that was compiled last.
        """
        found: list[GraphRecord] = []
        for each in self.graphs:
            if self._is_alike(each):
                found = [*(one for one in found if not each.is_version_of(one)), each]
        return found

    @property
    def others(self) -> list[GraphRecord]:
        """Graphs with a backward of models that have other options."""
        trained = [each for each in self.graphs if each.rehearsal is not None]
        return [each for each in trained if not self._is_alike(each)]

    def _is_alike(self, graph: GraphRecord) -> bool:
        first, own = self.session, graph.session
        if graph.rehearsal is None or first is None or own is None:
            return False
        return own.config == first.config

    def count(self, steps: int) -> None:
        """Say of each of `training` how often a step ran it, all versions together.

        Args:
            steps: that the program took, each of one optimizer or several.
        """
        for last in self.training:
            versions = [each for each in self.graphs if each.is_version_of(last)]
            runs = sum(each.runs for each in versions)
            assert last.rehearsal is not None
            last.rehearsal = dataclasses.replace(
                last.rehearsal,
                runs=runs / steps if runs and steps else 1.0,
                nested=max(1, *(each.nested for each in versions)),
            )


def captured_of(
    records: Sequence[GraphRecord],
    breaks: tuple[Break, ...],
    seen: Sequence[Compilation],
    stopped: str = "",
    left_out: str = "",
) -> Captured:
    """Count and collect.

    Args:
        records: all graphs.
        breaks: where they end early.
        seen: what Dynamo says about its compilations meanwhile.
        stopped: why the rest is not known.
        left_out: what no figure counts.
    """
    return Captured(
        len(records),
        sum(each.rehearsal is not None for each in records),
        sum(each.num_ops for each in records),
        breaks,
        tuple(recompiles(seen)),
        stopped,
        left_out,
    )


def _with(params: Sequence[ParamSpec], program: Program) -> tuple[ParamSpec, ...]:
    """All parameters of a model; names of programs that read several models are longer."""
    known = program.params.keys() <= {spec.name for spec in params}
    return tuple(params) if known else tuple(program.params.values())
