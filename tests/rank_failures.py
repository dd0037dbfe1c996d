"""What went wrong on the ranks of `tests.ranks`."""

from __future__ import annotations

from dataclasses import dataclass

OUTPUT_LINES = 40

native_crashes: list[str] = []
"""Jobs that ran once more, with the C++ stacks; `conftest.py` prints them."""


@dataclass(frozen=True)
class Failure:
    """What happened on one rank: an exception's class name, "Died", "Crashed" or "Hung".

    "Crashed" is a death in a thread in which no Python runs; `details` has its C++ stack then.
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
