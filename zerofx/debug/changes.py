"""Which other options would help: each candidate's programs are made and looked at anew."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from zerofx.config import Stage
from zerofx.debug.outcome import Outcome, Setting, outcome_of, programs_of
from zerofx.errors import ZeroFxError
from zerofx.frontend.layouts import lay_out
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.frontend.views import Programs
from zerofx.ir.ops import UNSHARD_START
from zerofx.ir.verify import peak_full_bytes
from zerofx.option_checks import at_stage
from zerofx.passes.buckets import default_target

Retrace = Callable[[torch.dtype | None, int], Sequence[Rehearsal]]
"""The same model with another `param_dtype` and a multiple of its batch."""

_WORTH = 0.01
_WORTH_MEMORY = 0.05
_STAGES: tuple[Stage, ...] = (0, 1, 2, 3)


@dataclasses.dataclass(frozen=True)
class Change:
    """One option with another value.

    Attributes:
        option: field of `ZeroConfig`, or `micro-batch`.
        value: as it is written.
        outcome: what was predicted for it.
        seconds: of a step, for as many samples as before.
        time_gain: share of the step that is saved; negative: lost.
        memory_gain: share of the peak that is saved.
        fits: whether the peak fits into the rank's memory, if that is known.
    """

    option: str
    value: str
    outcome: Outcome
    seconds: float
    time_gain: float
    memory_gain: float
    fits: bool

    @property
    def worth(self) -> float:
        """Time saved; memory counts only where it costs no time."""
        if self.time_gain >= _WORTH:
            return self.time_gain
        frees = self.memory_gain >= _WORTH_MEMORY and self.time_gain > -_WORTH
        return _WORTH * self.memory_gain if frees else 0.0


@dataclasses.dataclass(frozen=True)
class _Candidate:
    option: str
    value: str
    setting: Setting
    cast: torch.dtype | None = None
    times_batch: int = 1


@dataclasses.dataclass(frozen=True)
class Search:
    """The changes that were tried.

    Attributes:
        best: at most three, the best value of each option, most helpful first.
        tried: how many were planned anew.
        untried: options that could not be tried here, and why.
    """

    best: tuple[Change, ...]
    tried: int
    untried: tuple[tuple[str, str], ...]


def search(
    base: Outcome,
    programs: Sequence[Programs],
    rehearsals: Sequence[Rehearsal],
    setting: Setting,
    retrace: Retrace | None = None,
    say: Callable[[str], None] = lambda what: None,
) -> Search:
    """Try other options, one at a time.

    If the programs do not fit into `setting.memory_bytes`, what frees most memory helps most;
    otherwise what saves most time, of what fits.

    Args:
        base: the outcome of `programs`.
        programs: made with `setting`.
        rehearsals: from which they were made.
        setting: the options as they are.
        retrace: traces the model again; without it, options that change the trace are not tried.
        say: called with what begins.
    """
    found: list[Change] = []
    untried: list[tuple[str, str]] = []
    if retrace is None:
        why = "a script's graphs are not traced again; zerofx.explain(model, …) tries them"
        untried.append(("param_dtype and micro-batch", why))
    for each in _candidates(programs, rehearsals, setting, retrace is not None):
        say(f"planning with {each.option}={each.value}")
        try:
            found.append(_try(each, base, setting, rehearsals, retrace))
        except (ZeroFxError, RuntimeError, TypeError) as error:
            untried.append(
                (
                    f"{each.option}={each.value}",
                    (str(error) or type(error).__name__).splitlines()[0],
                )
            )
    crowded = setting.memory_bytes is not None and base.peak.total > setting.memory_bytes
    by = operator.attrgetter("memory_gain" if crowded else "worth")
    useful = [c for c in found if (c.memory_gain > 0 if crowded else c.fits and c.worth > 0)]
    best: dict[str, Change] = {}
    for change in sorted(useful, key=by, reverse=True):
        best.setdefault(change.option, change)
    return Search(tuple(best.values())[:3], len(found), tuple(untried))


def _try(
    candidate: _Candidate,
    base: Outcome,
    setting: Setting,
    rehearsals: Sequence[Rehearsal],
    retrace: Retrace | None,
) -> Change:
    if candidate.option in ("param_dtype", "micro-batch"):
        assert retrace is not None
        rehearsals = retrace(candidate.cast, candidate.times_batch)
    programs = programs_of(rehearsals, candidate.setting)
    outcome = outcome_of(programs, rehearsals, candidate.setting)
    seconds = outcome.times.step / candidate.times_batch
    room = setting.memory_bytes
    return Change(
        candidate.option,
        candidate.value,
        outcome,
        seconds,
        1 - seconds / base.times.step,
        1 - outcome.peak.total / base.peak.total,
        room is None or outcome.peak.total <= room,
    )


def _candidates(
    programs: Sequence[Programs],
    rehearsals: Sequence[Rehearsal],
    setting: Setting,
    traces: bool,
) -> Iterator[_Candidate]:
    config = setting.config

    def with_(option: str, value: Any) -> _Candidate:
        changed = dataclasses.replace(config, **{option: value})
        return _Candidate(option, str(value), dataclasses.replace(setting, config=changed))

    for stage in _STAGES:
        if stage != config.stage:
            other = dataclasses.replace(setting, config=at_stage(config, stage))
            yield _Candidate("stage", str(stage), other)
    laid = lay_out(rehearsals[0].params, config, setting.num_ranks)
    whole, now = sum(spec.full_bytes for spec in laid), config.bucket_bytes
    if now is None:
        now = default_target(laid, setting.machine.most_bucket_bytes)
    sizes = {0, now // 4, now // 2, 2 * now, 4 * now, 16 * now} if now else {whole // 8, whole // 2}
    yield from (with_("bucket_bytes", size) for size in sorted(sizes) if 0 <= size <= 2 * whole)
    if config.stage == 3:
        everything = _kept_bytes(programs)
        yield from (with_("memory_budget", n) for n in (0, everything // 2, everything))
        most = max(peak_full_bytes(program) for both in programs for program in both)
        yield from (with_("prefetch_bytes", n) for n in (0, 2 * most, 4 * most))
    if traces and config.param_dtype is None:
        changed = dataclasses.replace(config, param_dtype=torch.bfloat16)
        again = dataclasses.replace(setting, config=changed)
        yield _Candidate("param_dtype", "torch.bfloat16", again, cast=torch.bfloat16)
    if traces:
        yield _Candidate("micro-batch", "×2", setting, config.param_dtype, 2)


def _kept_bytes(programs: Sequence[Programs]) -> int:
    """Full values of all gathers of the forwards: what `memory_budget` could keep at most."""
    return sum(
        forward.full_bytes(start)
        for forward, _ in programs
        for start in forward.calls(UNSHARD_START)
    )
