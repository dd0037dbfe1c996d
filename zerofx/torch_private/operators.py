"""What the schemas of operations say."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch._ops import OperatorBase


def is_mutable(op: Any) -> bool:
    """Whether an operation writes to an argument."""
    return op._schema.is_mutable


def written_by(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operation writes to, such as `out`."""
    listed = op._schema.arguments
    given = dict(zip((each.name for each in listed), args, strict=False)) | kwargs
    return [given.get(each.name) for each in listed if each.alias_info and each.alias_info.is_write]


def is_operator(target: Any) -> bool:
    """Whether FX calls an operator with a schema or rules, or takes a member of what one gave."""
    return isinstance(target, OperatorBase) or target is operator.getitem
