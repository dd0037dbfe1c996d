"""Trials of all contenders, in turns, each in processes of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.compare.trial import Outcome, Trial
from benchmarks.launch import run_all, torchrun
from benchmarks.netlab import Lab

_MODULE = ["-m", "benchmarks.compare.trial"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where ranks run.

    Attributes:
        ranks: on each host.
        lab: hosts made of namespaces; this machine's own network if there is none.
        logs: folder for what ranks print.
        timeout: seconds for one trial.
        cold: every trial starts with an empty Inductor cache.
    """

    ranks: int
    lab: Lab | None
    logs: Path
    timeout: float = 900.0
    cold: bool = False

    @property
    def world(self) -> int:
        """Ranks of all hosts."""
        return self.ranks * (self.lab.hosts if self.lab else 1)

    def interface_for(self, device: str) -> str:
        """Where bytes are counted; empty for GPUs of one machine, which use none."""
        if self.lab:
            return self.lab.interface
        return "lo" if device == "cpu" else ""

    def commands(self, arguments: Sequence[str]) -> list[list[str]]:
        """One torchrun for each host."""
        command = [*_MODULE, *arguments]
        return (
            self.lab.torchrun(command, self.ranks) if self.lab else [torchrun(command, self.ranks)]
        )

    def environment(self) -> dict[str, str]:
        """What ranks are told."""
        given = self.lab.environment() if self.lab else {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        # One thread per rank: ranks that share cores otherwise fight over them.
        return {"OMP_NUM_THREADS": "1", **given}


def run_rounds(
    trials: Sequence[Trial], rounds: int, place: Place, report: Callable[[Trial, Outcome], None]
) -> list[Outcome]:
    """Memory of each contender once, then times of all of them, `rounds` times in turns.

    Who fails is not asked again.
    """
    place.logs.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    failed: set[str] = set()
    for number in range(rounds + 1):
        for trial in trials:
            if trial.contender in failed or (trial.memory and number):
                continue
            if not trial.memory and not number:
                continue
            outcome = run_trial(trial, place)
            report(trial, outcome)
            outcomes.append(outcome)
            if outcome.failure:
                failed.add(trial.contender)
    return outcomes


def run_trial(trial: Trial, place: Place) -> Outcome:
    """One trial; whatever goes wrong in its processes becomes its failure."""
    kind = "memory" if trial.memory else "time"
    log = place.logs / f"{trial.contender}-{kind}.log"
    with tempfile.TemporaryDirectory() as folder, _cache(place) as cache, log.open("wb") as output:
        result = Path(folder) / "outcome.json"
        commands = place.commands([*trial.arguments(), f"--result={result}"])
        try:
            code = run_all(commands, {**place.environment(), **cache}, place.timeout, output)
        except TimeoutError as error:
            return Outcome(trial.contender, failure=f"{error}; see {log}")
        if result.exists():
            return Outcome(**json.loads(result.read_text()))
    return Outcome(trial.contender, failure=f"ended with code {code}; see {log}")


@contextlib.contextmanager
def _cache(place: Place) -> Iterator[dict[str, str]]:
    if not place.cold:
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        yield {"TORCHINDUCTOR_CACHE_DIR": folder}
