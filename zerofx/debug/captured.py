"""What Dynamo captured of a program: graphs, where they end, and what is compiled again.

Each break names the user's line and a remedy; Dynamo's own hints where it has some.
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from traceback import FrameSummary

from zerofx.errors import UnsupportedError
from zerofx.frontend.breaks import function_named, read_break, read_words, shorten
from zerofx.torch_private import Compilation

_ZEROFX = os.path.dirname(os.path.dirname(__file__)) + os.sep
UNCOMPILED = "is not compiled at all"
_DYNAMIC = "torch._dynamo.mark_dynamic(input, dim) or dynamic=True, or pad inputs to a few lengths"


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
        left_out: what is explained by none of the figures; empty if all is.
    """

    graphs: int
    training: int
    num_ops: int
    breaks: tuple[Break, ...]
    recompiles: tuple[Recompile, ...]
    stopped: str = ""
    left_out: str = ""


def breaks_of(
    said: Iterable[tuple[str, Sequence[FrameSummary]]], seen: Iterable[Compilation]
) -> tuple[Break, ...]:
    """Each place where a graph ends, and functions without any; each once.

    Args:
        said: Dynamo's words and the user's frames there; no words where a function returned.
        seen: what it compiled.
    """
    ended = [_break(words, frames) for words, frames in said if words]
    return tuple(dict.fromkeys([*ended, *failed(seen)]))


def _break(words: str, frames: Sequence[FrameSummary]) -> Break:
    found = read_break(words, frames)
    place = Place(found.file, found.line, found.function, found.code)
    return Break(place, found.reason, " ".join(found.remedies))


def untrained(what: str, found: Sequence[Break], otherwise: tuple[str, str]) -> UnsupportedError:
    """The error for a program of which no graph has a backward.

    Args:
        what: the program's name.
        found: the reason, if there are any.
        otherwise: what to say and the remedy, if there is none.
    """
    if not found:
        return UnsupportedError(*otherwise)
    return UnsupportedError(
        f"nothing of {what} that trains was captured: it runs outside of graphs, which costs one "
        "gather for each parameter and is not predicted",
        "; ".join(dict.fromkeys(each.remedy for each in found)),
        [f"{each.place}: {each.place.code}: {each.reason}" for each in found],
    )


def failed(compilations: Iterable[Compilation]) -> Iterator[Break]:
    """The user's functions that Dynamo gave up: they run as plain Python."""
    for each in compilations:
        if each.failure and not each.filename.startswith(_ZEROFX):
            file, line = each.failed_at
            place = _place(file or each.filename, line or each.line, each.function)
            reason, remedies = read_words(each.failure)
            whole = f"{each.function} {UNCOMPILED}: {reason}"
            yield Break(place, whole, " ".join(remedies))


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
    code = linecache.getline(file, line).strip()
    return Place(shorten(file), line, function_named(function), code)


def _guard(reason: str) -> str:
    first = next((line.strip() for line in reason.splitlines() if line.strip()), "unknown")
    return re.sub(r"^\d+/\d+: ", "", first)


def _remedy_of_guard(reason: str) -> str:
    if "size mismatch" in reason or ".size()" in reason or "stride mismatch" in reason:
        return _DYNAMIC
    if "GLOBAL_STATE" in reason or "grad_mode" in reason:
        return "training and evaluation are two programs: nothing to do"
    return "keep what the guard names the same in every call, or pass it as a tensor"
