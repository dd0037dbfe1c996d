"""Run a user's script as it is, and watch: its graphs, and the time from step to step."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import runpy
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from zerofx.debug.captured import Break, breaks_of, untrained
from zerofx.debug.explanation import Measured
from zerofx.debug.record import Recorder
from zerofx.errors import UnsupportedError, ZeroFxError
from zerofx.frontend.breaks import line_of
from zerofx.frontend.watch import watched_by
from zerofx.torch_private import Compilation, compilations, graph_breaks


@dataclasses.dataclass(frozen=True)
class Run:
    """What a script did.

    Attributes:
        recorder: its graphs.
        breaks: where they end early.
        seen: what Dynamo compiled.
        measured: times of its steps.
    """

    recorder: Recorder
    breaks: tuple[Break, ...]
    seen: tuple[Compilation, ...]
    measured: Measured


@dataclasses.dataclass
class _Clock:
    """Seconds from one step to the next, where nothing was compiled in between.

    A step has one optimizer or several, and some of these call others.
    """

    recorder: Recorder
    seconds: list[float] = dataclasses.field(default_factory=list[float])
    steps: int = 0
    _before: float | None = None
    _forwards: int = 0

    def tick(self, *_: Any) -> None:
        """An optimizer stepped: the first one after a forward begins a step."""
        forwards, self._forwards = self._forwards, self.recorder.forwards
        if self._forwards == forwards:
            return
        self.steps += 1
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.time()
        if self._before is not None and not compilations(self._before):
            self.seconds.append(now - self._before)
        self._before = now


def run_script(script: Path, arguments: Sequence[str]) -> Run:
    """Run a script as `python script arguments` does, in this process.

    Without torchrun it is the only rank of its world.

    Args:
        script: to run.
        arguments: of the script.

    Raises:
        UnsupportedError: it failed, or no zerofx backend compiled anything that trains.
    """
    recorder, begin = Recorder(), time.time()
    clock = _Clock(recorder)
    handle = register_optimizer_step_post_hook(clock.tick)
    try:
        with _world(), _arguments(script, arguments), watched_by(recorder):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise UnsupportedError(f"{script} left with {left.code!r}", _ALONE) from left
    except ZeroFxError:
        raise
    except Exception as error:
        said = (str(error).strip().splitlines() or [""])[0]
        raise UnsupportedError(
            f"{script} failed at {line_of(error)}: {type(error).__name__}: {said}",
            _ALONE,
        ) from error
    finally:
        handle.remove()
    seen = compilations(begin)
    # Dynamo forgets its breaks where the script resets it; graphs know theirs.
    breaks = breaks_of([*(each.ended for each in recorder.graphs), *graph_breaks()], seen)
    if not recorder.training:
        nothing = f"{script} trained nothing that a zerofx backend compiled in the main thread"
        raise untrained(script.name, breaks, (nothing, _COMPILE))
    recorder.count(clock.steps)
    return Run(recorder, breaks, tuple(seen), _measured(recorder, clock.seconds, seen))


_COMPILE = 'compile the model with torch.compile(model, backend="zero3") and take a step or two'
_ALONE = "run it without explain first; --debug shows where"


def _measured(
    recorder: Recorder, seconds: Sequence[float], seen: Sequence[Compilation]
) -> Measured:
    cuda = torch.cuda.is_available()
    session = recorder.session
    assert session is not None  # something trained
    return Measured(
        session.world.size,
        len(seconds),
        statistics.median(seconds) if seconds else None,
        sum(each.seconds for each in seen),
        torch.cuda.max_memory_allocated() if cuda else None,
    )


@contextlib.contextmanager
def _arguments(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv` and `sys.path` as the script finds them when Python runs it."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _world() -> Iterator[None]:
    """What torchrun tells a rank; without it, that there is one."""
    if "RANK" in os.environ:
        yield
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
