"""What the schemas of operations say."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch._ops import OperatorBase


def is_mutable(op: Any) -> bool:
    """Whether an operation writes to an argument."""
    return op._schema.is_mutable


def arguments_by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, without defaults."""
    names = (each.name for each in op._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_by(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to, such as `out`."""
    given, listed = arguments_by_name(op, args, kwargs), op._schema.arguments
    return [given.get(each.name) for each in listed if each.alias_info and each.alias_info.is_write]


def is_operator(target: Any) -> bool:
    """Whether FX calls an operator with a schema or rules, or takes a member of what one gave."""
    return isinstance(target, OperatorBase) or target is operator.getitem
