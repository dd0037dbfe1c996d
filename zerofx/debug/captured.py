"""What Dynamo captured of a program: graphs, where they end, and what is compiled again.

Each break names the user's line and a remedy; Dynamo's own hints where it has some.
"""

from __future__ import annotations

import dataclasses
import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import fx

from zerofx.torch_private import Compilation, why_graph_ends

_BRANCH = (
    "a branch on a tensor's values",
    "write torch.where(condition, a, b) or torch.cond, or move the branch out of forward",
)
_DEFAULT_REMEDY = (
    "move the line out of forward; torch.compile(model, fullgraph=True) says more about it"
)
_DYNAMIC = "torch._dynamo.mark_dynamic(input, dim) or dynamic=True, or pad inputs to a few lengths"
_MOST_HINTS = 2


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of the user's program.

    Attributes:
        file: its path, relative to the working directory if it lies there.
        line: number, from 1.
        function: in which it stands.
        code: the line itself.
    """

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclasses.dataclass(frozen=True)
class Break:
    """A place where one graph ends and Python goes on.

    Attributes:
        place: the user's line.
        reason: what could not be captured.
        remedy: what the user does about it.
    """

    place: Place
    reason: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Recompile:
    """A function that was compiled again.

    Attributes:
        place: its first line.
        reason: the guard that failed.
        remedy: what the user does about it.
        seconds: that compiling it again took.
    """

    place: Place
    reason: str
    remedy: str
    seconds: float


@dataclasses.dataclass(frozen=True)
class Captured:
    """What Dynamo made of the program.

    Attributes:
        graphs: that were compiled.
        training: of these, how many have a backward that shards or gathers.
        num_ops: operations in them.
        breaks: where one graph ends and Python goes on.
        recompiles: functions that were compiled again.
        stopped: why the rest could not be rehearsed; empty if all of it was.
    """

    graphs: int
    training: int
    num_ops: int
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    stopped: str = ""


def break_of(module: fx.GraphModule) -> Break | None:
    """Where and why Dynamo ended this graph; `None` if the function returns there."""
    found = why_graph_ends(module)
    if found is None:
        return None
    reason, stack = found
    if not stack:
        return Break(_place("", 0, ""), *_read(reason))
    last = stack[-1]
    return Break(_place(last.filename, last.lineno or 0, last.name), *_read(reason))


def failed(compilations: Iterable[Compilation]) -> Iterator[Break]:
    """Functions that Dynamo gave up: they run as plain Python."""
    for each in compilations:
        if each.failure:
            file, line = each.failed_at
            place = _place(file or each.filename, line or each.line, each.function)
            reason, remedy = _read(each.failure)
            yield Break(place, f"{each.function} is not compiled at all: {reason}", remedy)


def recompiles(compilations: Sequence[Compilation]) -> list[Recompile]:
    """Functions that were compiled again, and why."""
    return [
        Recompile(
            _place(each.filename, each.line, each.function),
            _guard(each.recompile_reason),
            _remedy_of_guard(each.recompile_reason),
            each.seconds,
        )
        for each in compilations
        if each.recompile_reason
    ]


def _place(file: str, line: int, function: str) -> Place:
    # A resumed function is the rest of one: torch_dynamo_resume_in_forward_at_10.
    name = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", function)
    path, here = Path(file), Path.cwd()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    return Place(str(shown), line, name, linecache.getline(file, line).strip())


def _read(reason: str) -> tuple[str, str]:
    """Dynamo's text as one line of reason and one of remedy."""
    if reason.startswith("generic_jump") or reason.startswith("Data-dependent branching"):
        return _BRANCH
    hints = re.findall(r"^\s*Hint: (.+)$", reason, re.M)
    useful = [hint for hint in hints if "report an issue" not in hint][:_MOST_HINTS]
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "unknown")
    explained = re.search(r"Explanation: (.+)$", reason, re.M)
    why = f"{first}: {explained[1].strip()}" if explained else first
    return why, " ".join(useful) or _DEFAULT_REMEDY


def _guard(reason: str) -> str:
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "unknown")
    return re.sub(r"^\d+/\d+: ", "", first)


def _remedy_of_guard(reason: str) -> str:
    if "size mismatch" in reason or ".size()" in reason or "stride mismatch" in reason:
        return _DYNAMIC
    if "GLOBAL_STATE" in reason or "grad_mode" in reason:
        return "training and evaluation are two programs: nothing to do"
    return "keep what the guard names the same in every call, or pass it as a tensor"
