"""Every error that zerofx shows to a user.

Each names what is wrong (parameter, module, node, pass), where, and the remedy. A class is a
category that a program may catch; the sentence is built where the facts are known.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch


class ZeroFxError(RuntimeError):
    """Base class of all zerofx errors.

    Args:
        problem: one sentence that names the offending thing.
        remedy: what the user does about it.
        offenders: fully qualified names, listed below the sentence (all of them, at most 20 shown).
    """

    def __init__(self, problem: str, remedy: str = "", offenders: Iterable[str] = ()) -> None:
        self.problem = problem
        self.remedy = remedy
        self.offenders = tuple(offenders)
        super().__init__(_text(problem, remedy, self.offenders))

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors of workers travel to whoever waits for them; `__init__` may want other arguments.
        return _unpickled, (type(self), self.args), vars(self)


class ConfigError(ZeroFxError, ValueError):
    """An option is unknown, has a wrong type or contradicts another one."""


class UnsupportedError(ZeroFxError):
    """The model, optimizer or process group is of a kind that zerofx refuses by name."""


class ShardingError(ZeroFxError):
    """The model cannot be sharded here and now."""


class UnreducedGradientError(ZeroFxError):
    """An optimizer is about to apply gradients that no rank exchanged."""


class LossScaleError(ZeroFxError):
    """Gradients overflow at the lowest loss scale that is allowed."""


class NonFiniteGradientError(ZeroFxError):
    """A gradient has nan or inf before an optimizer step (option `detect_anomaly`)."""


class StaleHandleError(ZeroFxError):
    """A parameter object from before sharding is used after it."""


class CheckpointError(ZeroFxError):
    """A checkpoint is missing, damaged, does not fit, or could not be written."""


class MissingPackageError(ZeroFxError, ImportError):
    """An optional package is not installed."""


class PassError(ZeroFxError):
    """A pass refused its input."""


class VerificationError(ZeroFxError):
    """A program broke a rule after a pass; `rule` is the rule's name."""

    def __init__(
        self, rule: str, problem: str, remedy: str = "", offenders: Iterable[str] = ()
    ) -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {problem}", remedy, offenders)


class KernelError(ZeroFxError):
    """A kernel got operands that its spec does not describe, or cannot be made on this machine."""


class DivergedError(ZeroFxError):
    """Ranks run different programs, or issue collectives in a different order."""


class RankGoneError(ZeroFxError):
    """A collective failed because other ranks ended; `ranks` are their global numbers."""

    def __init__(self, problem: str, remedy: str = "", ranks: Iterable[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(problem, remedy)


class OutOfMemoryError(ZeroFxError, torch.OutOfMemoryError):
    """An allocator failed inside a program; torch's own class, on CPUs too."""


def _unpickled(kind: type[ZeroFxError], args: tuple[Any, ...]) -> ZeroFxError:
    return kind.__new__(kind, *args)


def _text(problem: str, remedy: str, offenders: tuple[str, ...]) -> str:
    lines = [problem]
    lines += [f"  - {name}" for name in offenders[:20]]
    if len(offenders) > 20:
        lines.append(f"  … and {len(offenders) - 20} more")
    if remedy:
        lines.append(f"Remedy: {remedy}")
    return "\n".join(lines)


def nearest(text: str, known: Iterable[str]) -> str:
    """A hint, before what else a remedy says, at the name that `text` may have meant; or empty."""
    near = difflib.get_close_matches(text, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
