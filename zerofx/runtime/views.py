"""Views of sharded tensors: where `DTensor` copies rows, copies show and write what is there.

`param[3].zero_()`, `torch.chunk(bias, 4)[1].fill_(1)`, `for row in param.data: row.neg_()`; and a
view that was taken once and is written to after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.in_place import everywhere, full, methods
from zerofx.runtime.parameter import (
    Copied,
    Sharded,
    ShardedParameter,
    copied,
    local_tensor,
    show_rows,
    write_rows,
)
from zerofx.torch_private import is_traced, shares_storage


def copied_among(values: Sequence[Any]) -> list[Any]:
    """Those that are views for which `DTensor` copied rows."""
    return [each for each in values if getattr(each, "_whole", None) is not None]


def look_through(whole: Tensor, found: Any, view: Callable[[Tensor], Any]) -> None:
    """Let writes to what torch gives for a view be writes to what it is of.

    Args:
        whole: a tensor.
        found: what torch gives: a tensor, or several; it may have copied rows for it.
        view: gives the same of the full tensor.
    """
    if not isinstance(whole, Sharded) or is_traced(local_tensor(whole)):
        return
    if isinstance(found, Sequence):
        for place, part in enumerate(found):
            look_through(whole, part, lambda whole, place=place: view(whole)[place])
    elif whole._whole is not None:
        first = whole._view
        copied(found, whole._whole, lambda whole: view(first(whole)), _kind_of(whole))
    elif not shares_storage(local_tensor(found), local_tensor(whole)):
        copied(found, whole, view, _kind_of(whole))
    elif type(found) is DTensor:
        found.__class__ = Sharded


def _kind_of(whole: Sharded) -> type[Sharded]:
    # torch traces those that have gradients as the views that autograd takes them for.
    return Sharded if torch.is_grad_enabled() and whole.requires_grad else Copied


def write_through(rows: Any, write: Callable[[], Any], operands: Sequence[Tensor]) -> Any:
    """Let a function write to rows that `DTensor` copied, and to what they are of; methods do so.

    Raises:
        UnsupportedError: gradients go through them.
    """
    whole = rows._whole
    if torch.is_grad_enabled() and any(each.requires_grad for each in (whole, *operands)):
        raise UnsupportedError(
            "a function writes to rows of a sharded tensor in place, and gradients are wanted",
            "call a method, `value[0].neg_()` instead of `torch.neg_(value[0])`, or write "
            "`value[0] = -value[0]`; or, if no gradients are wanted, `with torch.no_grad():` "
            "around it",
        )
    with torch.no_grad():
        values = full(whole)
        there = rows._view(values)
        show_rows(rows, there)
        found = write()
        there.copy_(full(rows))
        whole.copy_(everywhere(whole, values))
    return found


def _where_rows_lie(method: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self._whole is None:
            return method(self, *args, **kwargs)
        return write_rows(self, method, *args, **kwargs)

    return write


def _unflatten(kind: type[Sharded], *args: Any) -> Any:
    made: Any = DTensor.__tensor_unflatten__(*args)
    made.__class__ = kind
    return made


KINDS: tuple[type[Sharded], ...] = (Sharded, ShardedParameter, Copied)
# AOTAutograd compares the classes of fake and real inputs.
setattr(Sharded, "__tensor_unflatten__", classmethod(_unflatten))  # noqa: B010 (typed otherwise)
for _name, _method in methods():
    setattr(Sharded, _name, _where_rows_lie(_method))
