"""What is known about a key of `ds_config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

Kind = Literal["honoured", "always", "missing", "refused"]
Type = Literal["bool", "count", "number", "text", "texts", "numbers", "pair", "any"]


@dataclasses.dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        path: with dots: `zero_optimization.stage`.
        kind: `honoured`: it sets something; `always`: what it switches is always so, or has no
            counterpart, and no number depends on it; `missing`: refused until zerofx has it;
            `refused`: refused for good.
        meaning: what it sets, why nothing depends on it, or why it is refused.
        type: of its value.
        needed: "auto" has no default: the caller says what it means.
        off: values of a missing or refused key that ask for nothing; by default false, null, 0,
            "none", and sections that are empty or not enabled.
        stages: at which it means something; by default all.
    """

    path: str
    kind: Kind
    meaning: str
    type: Type = "any"
    needed: bool = False
    off: tuple[Any, ...] = ()
    stages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class IfAuto:
    """Of `auto`: a value for a key that is "auto"; another one in the file holds, too."""

    value: Any


def keys(
    kind: Kind, section: str, rows: Iterable[tuple[str, str]], type: Type = "any", **also: Any
) -> list[Key]:
    """Keys of one section that differ in name and meaning only."""
    prefix = f"{section}." if section else ""
    return [Key(prefix + name, kind, meaning, type, **also) for name, meaning in rows]
