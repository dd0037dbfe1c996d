"""Follow programs through their passes: into a folder, torch's structured trace, and the log."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import fx

from zerofx.cost.liveness import NOTHING_HELD
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.frontend.breaks import Break, find_break
from zerofx.frontend.predict import Prediction, Setting, left_by, predict
from zerofx.frontend.report import Ran, describe_graph, describe_program
from zerofx.frontend.standalone import standalone
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.text import diff, node_names, print_program
from zerofx.page.build import graph_folders, write_page
from zerofx.passes.base import Pass, run_passes
from zerofx.torch_private import is_tracing, trace_artifact

_log = logging.getLogger("zerofx.programs")


@dataclasses.dataclass(frozen=True)
class Finished:
    """A program after its last pass.

    Attributes:
        region: the part of the step.
        summary: one line for a person.
        report: everything so far about the graph, for machines.
        python: the program as a file that runs.
    """

    region: str
    summary: str
    report: Mapping[str, Any]
    python: str


class Reader(Protocol):
    """Who is told."""

    def passed(self, region: str, stem: str, before: str, text: str) -> None:
        """A pass ran; `stem` is its number and name, `before` is empty at the start."""

    def finished(self, done: Finished) -> None:
        """No pass follows."""


class Dump:
    """The observer of all programs of one Dynamo graph.

    Attributes:
        number: which of those of this process in its folder; without one, of those without.

    Args:
        number: see there.
        passes: the pipeline.
        readers: who is told.
        setting: where the programs run.
    """

    def __init__(
        self, number: int, passes: Sequence[Pass], readers: Sequence[Reader], setting: Setting
    ) -> None:
        self.number = number
        self._setting = setting
        self._ended: Break | None = None
        self._held = NOTHING_HELD
        self.use(passes)
        self._readers = readers
        self._texts: dict[str, str] = {}
        self._names: dict[str, Mapping[fx.Node, str]] = {}
        self._ran: dict[str, list[Ran]] = collections.defaultdict(list)
        self._programs: dict[str, dict[str, Any]] = {}

    def use(self, passes: Sequence[Pass]) -> None:
        """The pipeline is another one from here on; names of passes stay."""
        self._passes = {each.name: each for each in passes}

    def graph(self, module: fx.GraphModule) -> None:
        """Tell of Dynamo's graph, from which all programs come."""
        self._ended = find_break(module)

    def begin(self, program: Program) -> None:
        """Tell of a program that no pass has seen."""
        region = program.region.value
        self._texts[region], self._names[region] = "", {}
        self._ran.pop(region, None)
        self._tell(program, "traced")

    def __call__(self, program: Program, name: str, plan: Any) -> None:
        """Tell of a program as the pass `name` left it."""
        region = program.region.value
        before, names = self._texts[region], self._names[region]
        self._tell(program, name)
        known = {**self._names[region], **names}
        changed = self._texts[region] != before
        self._ran[region].append(Ran(self._passes[name], plan, known, changed))

    def end(self, program: Program) -> None:
        """Tell of a finished program."""
        region = program.region.value
        found = self._predict(program)
        self._programs[region] = entry = describe_program(program, self._ran[region], found)
        programs = list(self._programs.values())
        report = describe_graph(self.number, program.stage, programs, self._setting, self._ended)
        try:
            python = standalone(program)
        except UnsupportedError as error:
            python = f'"""This program cannot run on its own: {error}"""\n'
        done = Finished(region, f"graph {self.number}: {_summary(entry)}", report, python)
        for reader in self._readers:
            reader.finished(done)

    @property
    def has_folder(self) -> bool:
        """Whether this rank writes files."""
        return any(isinstance(reader, _Folder) for reader in self._readers)

    def measured(self, region: str, times: Mapping[str, Any]) -> None:
        """Write down when the steps of a program ran."""
        for reader in self._readers:
            if isinstance(reader, _Folder):
                reader.measured(region, times)

    def _predict(self, program: Program) -> Prediction | None:
        if program.region is Region.JOINT:
            return None
        before = self._held if program.region is Region.BACKWARD else NOTHING_HELD
        self._held = left_by(program, self._setting)
        return predict(program, self._setting, before)

    def _tell(self, program: Program, name: str) -> None:
        region, text = program.region.value, print_program(program)
        stem = f"{len(self._ran[region]) + (name != 'traced'):03d}_{name}"
        for reader in self._readers:
            reader.passed(region, stem, self._texts[region], text)
        self._texts[region], self._names[region] = text, node_names(program)


def dump_for(
    folder: str,
    number: Callable[[], int],
    passes: Sequence[Pass],
    setting: Setting,
) -> Dump | None:
    """The observer for whoever wants to know; `None` if nobody does.

    Args:
        folder: into which this rank writes; empty for none.
        number: gives the graph its number, if somebody wants to know.
        passes: the pipeline.
        setting: where the programs run.

    Raises:
        ConfigError: nothing can be written into the folder.
    """
    told = list[Reader]()
    if is_tracing():
        told.append(_Trace())
    if _log.isEnabledFor(logging.INFO):
        told.append(_Log())
    if not passes or not (told or folder):
        return None  # a graph without parameters has no programs of ours
    taken = number()
    if folder:
        told.append(_Folder(_made(Path(folder), taken)))
    return Dump(taken, passes, told, setting)


def run_told(program: Program, passes: Sequence[Pass], dump: Dump | None, *, check: bool) -> None:
    """Run passes, as `run_passes` does, and tell `dump`, if there is one, of begin and end, too."""
    if dump is not None:
        dump.begin(program)
    run_passes(program, passes, check=check, observer=dump)
    if dump is not None:
        dump.end(program)


def _made(folder: Path, number: int) -> Path:
    """The folder of one graph. Graphs from there on are an older run's: they go."""
    with _writing(folder):
        for place, old in graph_folders(folder).items():
            if place >= number:
                _clear(old)
        made = folder / f"graph{number}"
        made.mkdir(parents=True, exist_ok=True)
    return made


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"option dump: nothing can be written into {folder}: {error.strerror}",
            "name a folder that this rank may write to, with room on its disk",
        ) from error


def _clear(graph: Path) -> None:
    """Remove what a dump wrote, and folders that are empty then."""
    for region in Region:
        _clear_region(graph / region.value)
    (graph / "report.json").unlink(missing_ok=True)
    if not any(graph.iterdir()):
        graph.rmdir()


def _clear_region(folder: Path) -> None:
    for pattern in ("[0-9][0-9][0-9]_*.txt", "[0-9][0-9][0-9]_*.diff", *_ONE_EACH):
        for file in folder.glob(pattern):
            file.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


_ONE_EACH = ("program.py", "measured.json")


@dataclasses.dataclass(frozen=True)
class _Folder:
    """`<region>/000_traced.txt`, a `.txt` and a `.diff` a pass, `program.py`; data; the page."""

    root: Path

    def passed(self, region: str, stem: str, before: str, text: str) -> None:
        folder = self.root / region
        with _writing(self.root):
            if not before:
                _clear_region(folder)  # a program that begins anew may have other passes
            folder.mkdir(parents=True, exist_ok=True)
            _write(folder / f"{stem}.txt", text)
            if before:
                _write(folder / f"{stem}.diff", diff(before, text))

    def finished(self, done: Finished) -> None:
        with _writing(self.root):
            _write(self.root / done.region / "program.py", done.python)
            _write(self.root / "report.json", json.dumps(done.report, indent=1) + "\n")
            if done.region != Region.JOINT.value:
                write_page(self.root.parent)

    def measured(self, region: str, times: Mapping[str, Any]) -> None:
        # Apart from the report, which is the same on every run.
        with _writing(self.root):
            _write(self.root / region / "measured.json", json.dumps(times, indent=1) + "\n")
            write_page(self.root.parent)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


class _Trace:
    """Artifacts of torch's structured trace, which `tlparse` shows with each compilation."""

    def passed(self, region: str, stem: str, before: str, text: str) -> None:
        trace_artifact(f"zerofx_{region}_{stem}", text)

    def finished(self, done: Finished) -> None:
        trace_artifact(f"zerofx_{done.region}_program.py", done.python)
        trace_artifact("zerofx_report.json", json.dumps(done.report))


class _Log:
    """`TORCH_LOGS="zerofx"`: a line for each program; `"+zerofx"`: what each pass changed."""

    def passed(self, region: str, stem: str, before: str, text: str) -> None:
        changes = diff(before, text) if before else text
        _log.debug("%s after %s\n%s", region, stem, changes or "(nothing changed)\n")

    def finished(self, done: Finished) -> None:
        _log.info("%s", done.summary)


def _summary(entry: Mapping[str, Any]) -> str:
    kinds = [each["kind"] for each in entry["collectives"]]
    return (
        f"{entry['region']} program: {len(entry['passes'])} passes, {kinds.count('unshard')} "
        f"gathers and {kinds.count('reduce')} reductions, which send {entry['wire_bytes']} B; "
        f"at most {entry['peak_full_bytes']} B of full values at once"
    )
