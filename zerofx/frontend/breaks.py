"""Graph breaks: where Dynamo ended a graph before the function did, why, and what helps."""

from __future__ import annotations

import dataclasses
import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from traceback import FrameSummary

from torch import fx

from zerofx.torch_private import why_graph_ended

_PACKAGES = "site-packages" + os.sep
_LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")),
    os.path.dirname(os.path.dirname(__file__)) + os.sep,  # zerofx
    "<frozen ",
)


@dataclasses.dataclass(frozen=True)
class Break:
    """The place where a graph ends early.

    Attributes:
        reason: in a line.
        file: relative to the working directory, or to the folder of installed packages.
        line: number of the user's line.
        function: that it is in.
        code: the line itself.
        remedies: what would keep the graph whole, in Dynamo's words if it has any.
    """

    reason: str
    file: str
    line: int
    function: str
    code: str
    remedies: tuple[str, ...]


def find_break(module: fx.GraphModule) -> Break | None:
    """What ended Dynamo's graph; `None` if its function returned.

    Args:
        module: Dynamo's graph, as a backend gets it.
    """
    words, frames = why_graph_ended(module)
    return read_break(words, frames) if words else None


def read_break(words: str, frames: Sequence[FrameSummary]) -> Break:
    """Read Dynamo's words about a break.

    Args:
        words: a headline, then `Explanation:` and `Hint:` lines.
        frames: the user's, inmost last.
    """
    frame = frames[-1] if frames else FrameSummary("", 0, "", lookup_line=False, line="")
    reason, remedies = read_words(words)
    return Break(
        reason=reason,
        file=shorten(frame.filename),
        line=frame.lineno or 0,
        function=function_named(frame.name),
        code=(frame.line or "").strip(),
        remedies=remedies,
    )


def read_words(words: str) -> tuple[str, tuple[str, ...]]:
    """Dynamo's words as one line of reason, and remedies."""
    if words.startswith(("generic_jump", "Data-dependent branching")):
        return _BRANCH
    if raised := _RAISED.search(words):
        return f"it raises {raised[1]}", (_OWN_ERROR,)
    lines = [line.strip() for line in words.strip().splitlines()]
    explained = [line.partition(": ")[2] for line in lines if line.startswith("Explanation: ")]
    hints = [line.partition(": ")[2] for line in lines if line.startswith("Hint: ")]
    useful = tuple(hint for hint in hints if "report an issue" not in hint)
    head = lines[0] if lines else "unknown"
    return ". ".join(part.rstrip(".") for part in (head, *explained)), useful or (_REMEDY,)


def function_named(name: str) -> str:
    """The user's function: a resumed one, `torch_dynamo_resume_in_forward_at_10`, is its rest."""
    return re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"\1", name)


_BRANCH = (
    "a branch on a tensor's values",
    ("write torch.where(condition, a, b) or torch.cond, or move the branch out of forward",),
)


_RAISED = re.compile(r"^Observed exception.*raised exception (\S[^\n]*)", re.S)
_OWN_ERROR = "call the model with such inputs, without torch.compile, to see its own error"

_REMEDY = (
    "Move this line out of the compiled function, or compile the parts before and behind it; "
    "`fullgraph=True` turns every break into an error."
)


def line_of(error: Exception) -> str:
    """`file:line` of the user's line that failed: the inmost one outside of libraries."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"  # of code that never ran
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_LIBRARIES) and _PACKAGES not in frame.filename
    ]
    where = (own or frames)[-1]
    return f"{where.filename}:{where.lineno}"


def shorten(path: str) -> str:
    """A path without what differs between machines, where that is known."""
    if _PACKAGES in path:
        return path.rpartition(_PACKAGES)[2]
    inside = path.startswith(os.getcwd() + os.sep)
    return os.path.relpath(path) if inside else path
