"""What went wrong on the ranks of `tests.ranks`."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

OUTPUT_LINES = 40

native_crashes: list[str] = []
"""Jobs that ran once more, with the C++ stacks; `conftest.py` prints them."""


@dataclass(frozen=True)
class Failure:
    """What happened on one rank: an exception's class name, "Died", "Crashed" or "Hung".

    "Crashed" is a fatal signal in a thread in which no Python runs, or a heap that malloc found
    corrupt; `details` has the C++ stack, or what each thread was doing if the process hung while
    torch printed stacks.
    """

    rank: int
    kind: str
    message: str
    details: str
    output: str = ""

    def __str__(self) -> str:
        text = f"rank {self.rank}: {self.kind}: {self.message}\n{self.details.rstrip()}"
        if self.output:
            last = "\n".join(self.output.splitlines()[-OUTPUT_LINES:])
            text += f"\nlast output of rank {self.rank}:\n{last}"
        return text


class RanksFailed(RuntimeError):
    """A job failed; `failures` maps each rank that raised, died or hung to what it was doing."""

    def __init__(self, job: str, failures: dict[int, Failure]):
        self.failures = failures
        body = "\n\n".join(str(failures[rank]) for rank in sorted(failures))
        super().__init__(f"{job} failed on rank {', '.join(map(str, sorted(failures)))}\n\n{body}")


def native_stack(output: str) -> str:
    """The C++ stack of the thread that a fatal signal hit, if torch printed one."""
    return "\n".join(part for part in output.split("\n\n") if "::fatalSignalHandler(" in part)


def met_fatal_signal(output: str) -> bool:
    """Whether torch began to print stacks, which it does for nothing but a fatal signal.

    Printing allocates: a thread that is hit in the middle of an allocation waits for itself then.
    """
    return re.search(r"^SIG[A-Z]+\(\d+\), PID: \d+, Thread \d+", output, re.MULTILINE) is not None


def heap_complaint(output: str) -> str:
    """What malloc said if it found the heap corrupt: who did it wrote before, in any thread."""
    checks = (
        r"^((malloc|malloc_consolidate|free|realloc|munmap_chunk)\(\): |corrupted |double free)"
    )
    found = re.search(checks + ".*", output, re.MULTILINE)
    return found[0] if found else ""


def native_threads(pid: int) -> str:
    """Name, state and wait channel of each thread of a process, as Linux shows them."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
            name, waits = ((task / file).read_text().strip() for file in ("comm", "wchan"))
            lines.append(f"thread {task.name}: {name}, state {state}, in {waits}")
    return "\n".join(lines)
