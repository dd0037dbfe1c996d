"""A rank of `tests.ranks` as its parent sees it, and what is read off it when it fails."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.rank_failures import (
    Failure,
    heap_complaint,
    met_fatal_signal,
    native_stack,
    native_threads,
)


@dataclass
class Worker:
    """One rank as the parent sees it."""

    rank: int
    process: Any
    connection: Connection
    stacks: Path
    log: Path
    log_start: int = field(default=0)

    def output(self) -> str:
        return self.log.read_bytes()[self.log_start :].decode(errors="replace")

    def dump_stacks(self) -> str:
        """Has the worker write the stack of each of its threads, even one that is blocked in C."""
        before = self.stacks.stat().st_size
        try:
            os.kill(self.process.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return "(the process is gone)"
        size, give_up = before, time.monotonic() + 2
        while time.monotonic() < give_up:
            time.sleep(0.1)
            if (now := self.stacks.stat().st_size) > before and now == size:
                break
            size = now
        return self.stacks.read_bytes()[before:].decode(errors="replace") or "(no stacks)"

    def died(self, grace: float) -> Failure:
        """How the process ended, for which it gets `grace` seconds."""
        self.process.join(grace)
        stacks, output = self.stacks.read_text(errors="replace"), self.output()
        in_python, complaint = "Current thread" in stacks, heap_complaint(output)
        message = f"the process ended with exit code {self.process.exitcode} {complaint}".rstrip()
        crashed = complaint or (met_fatal_signal(output) and not in_python)
        details = stacks if in_python else native_stack(output) or stacks
        return Failure(self.rank, "Crashed" if crashed else "Died", message, details, output)

    def hung(self, reason: str) -> Failure:
        """What it is doing instead of answering; it may have crashed, and hang over its own end."""
        stacks, output = self.dump_stacks(), self.output()
        if not met_fatal_signal(output):
            return Failure(self.rank, "Hung", reason, stacks, output)
        threads = native_threads(self.process.pid)
        return Failure(self.rank, "Crashed", f"{reason} of a fatal signal", threads, output)
