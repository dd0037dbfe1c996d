"""`comms_logger`: what the process group was asked to do in a step."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.calls import KNOWN, Call, calls_in, listing, plain_name, table
from zerofx.integrations.deepspeed.settings import Settings
from zerofx.torch_private import is_profiling

_SECTION = "comms_logger"


@dataclasses.dataclass(frozen=True)
class CommsOptions:
    """What the section asks for.

    Attributes:
        prof_ops: operations to show, by plain names; `None`: all.
        verbose: whether to show each call, too.
    """

    prof_ops: frozenset[str] | None
    verbose: bool


def comms_options(settings: Settings) -> CommsOptions | None:
    """The section; `None` if it is not enabled, or names no operation.

    Raises:
        ConfigError: `prof_ops` names what no process group does.
    """
    given = settings.section(_SECTION)
    if not given.get("enabled", False):
        return None
    named = given.get("prof_ops", [])
    verbose = given.get("verbose", False)
    if given.get("prof_all", True):
        return CommsOptions(None, verbose)
    unknown = [each for each in named if plain_name(each) not in KNOWN]
    if unknown:
        raise ConfigError(
            f"{_SECTION}.prof_ops names no operation of a process group",
            f"the operations are: {', '.join(sorted(KNOWN))}",
            unknown,
        )
    return CommsOptions(frozenset(map(plain_name, named)), verbose) if named else None


class CommsReport:
    """Records some steps with torch's profiler, and shows their communication.

    The first step is not among them: it compiles. Rank 0 alone records, without a collective.

    Args:
        options: which operations to show, and how.
        every: steps between two that are recorded.
        write: where the text goes.
    """

    def __init__(self, options: CommsOptions, every: int, write: Callable[[str], None]) -> None:
        self._options, self._every, self._write = options, every, write
        self._recording: Recording | None = None

    def step(self, taken: int) -> None:
        """So many steps were taken: show the last one, if it was recorded; the next may be."""
        if self._recording is not None:
            self._write("\n".join(self._lines(taken, self._recording.events())))
            self._recording = None
        if (taken + 1) % self._every == 0:
            self._recording = Recording()

    def close(self) -> None:
        """Stop recording."""
        if self._recording is not None:
            self._recording.stop()
            self._recording = None

    def _lines(self, step: int, events: list[dict[str, Any]] | None) -> list[str]:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        heading = f"communication of step {step}, on rank 0 of {ranks}"
        if events is None:
            return [f"{heading}: not recorded, since another profiler ran"]
        calls = [each for each in calls_in(events, ranks) if self._wants(each)]
        if not calls:
            return [f"{heading}: none"]
        return [heading, *(listing(calls) if self._options.verbose else ()), *table(calls)]

    def _wants(self, call: Call) -> bool:
        return self._options.prof_ops is None or call.operation in self._options.prof_ops


class Recording:
    """torch's profiler, running until `stop`, the end of this object or of the program.

    Nothing is recorded where a profiler runs already: torch has one at a time, and a second one
    would end it.
    """

    def __init__(self) -> None:
        self._profiler: profile | None = None
        if is_profiling():
            return
        kinds = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=kinds, record_shapes=True)
        self._profiler.start()
        self._stop = weakref.finalize(self, _stopped, self._profiler)

    def stop(self) -> bool:
        """Stop; whether everything until now was recorded."""
        return self._profiler is not None and self._stop() is True

    def events(self) -> list[dict[str, Any]] | None:
        """Stop; what was recorded, as a trace has it; `None`: nothing, for another profiler ran."""
        if not self.stop():
            return None
        assert self._profiler is not None, "it ran"
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profiler.export_chrome_trace(path)
            return json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]


def _stopped(profiler: profile) -> bool:
    """Stop a profiler, unless another one has put an end to it."""
    if not is_profiling():
        return False
    profiler.stop()
    return True
