"""Stacks of equal blocks: a deep model is known from two shallow ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, cast

from torch import nn

from zerofx.ir.spec import ParamSpec

_LEAST = 6
"""A stack of fewer blocks is traced as it is."""


def stack_depth(model: nn.Module) -> int:
    """Number of blocks in each stack of equal blocks; 0 if there is none, or stacks differ."""
    depths = {len(stack) for stack in _stacks(model)}
    return depths.pop() if len(depths) == 1 else 0


def shorten(model: nn.Module, depth: int) -> None:
    """Keep the first `depth` blocks of each stack, in place."""
    for stack in _stacks(model):
        del stack[depth:]


def as_read(
    params: Sequence[ParamSpec], read: Iterable[str], *, shortened: bool
) -> tuple[list[ParamSpec], tuple[str, ...]]:
    """Parameters as a step trains them, and the names of those that forward does not read.

    These have neither gradients nor optimizer state, as frozen ones.

    Args:
        params: of the model.
        read: names of those that are read where it was traced.
        shortened: that had the first blocks only; the others read what these do.
    """

    def place(name: str) -> str:
        parts = name.split(".")
        return ".".join("#" if shortened and part.isdigit() else part for part in parts)

    known = set(map(place, read))
    idle = tuple(spec.name for spec in params if place(spec.name) not in known)
    return [
        dataclasses.replace(spec, trainable=spec.trainable and spec.name not in idle)
        for spec in params
    ], idle


def _stacks(model: nn.Module) -> list[nn.ModuleList]:
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) >= _LEAST]
    equal = [stack for stack in lists if _all_alike(stack)]
    inner = {id(below) for stack in equal for below in stack.modules() if below is not stack}
    return [stack for stack in equal if id(stack) not in inner]


def _all_alike(stack: nn.ModuleList) -> bool:
    """Whether blocks have equal classes, shapes and plain attributes; they may be numbered."""
    looks = [_look(block) for block in stack]
    if any(look.keys() != looks[0].keys() for look in looks):
        return False
    columns = [[look[key] for look in looks] for key in looks[0]]
    return all(column.count(column[0]) == len(column) or _counts(column) for column in columns)


def _counts(column: list[Any]) -> bool:
    if not all(type(value) is int for value in column):
        return False
    return column == list(range(column[0], column[0] + len(column)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, cast("tuple[Any, ...]", value)))
    return isinstance(value, (str, int, float, bool, type(None)))


def _look(block: nn.Module) -> dict[str, Any]:
    look: dict[str, Any] = {}
    for path, module in block.named_modules():
        look[path] = type(module)
        for key, value in vars(module).items():
            if not key.startswith("_") and _is_plain(value):
                look[f"{path}:{key}"] = value
    for name, param in block.named_parameters():
        look[f"param {name}"] = tuple(param.shape), param.dtype, param.requires_grad
    return look
