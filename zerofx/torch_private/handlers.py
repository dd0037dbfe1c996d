"""What `DTensor` asks before it does an operation in torch's way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes an operation and its arguments, and gives its result."""

HANDLERS: dict[Any, Handler] = DTensor._op_dispatcher._custom_op_handlers


def torchs_way(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does where it asks no handler; for handlers that have nothing to say."""
    handler = HANDLERS.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            HANDLERS[op] = handler


def operation_names(but: tuple[str, ...] = ()) -> Iterator[tuple[str, str, str]]:
    """Library, name and overload of every operation there is, but of libraries that begin so."""
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name.startswith(but):
            continue
        library, _, name = full_name.partition("::")
        name, _, overload = name.partition(".")
        yield library, name, overload or "default"


def operation(library: str, name: str, overload: str) -> Any:
    """The operation of these names."""
    return getattr(getattr(getattr(torch.ops, library), name), overload)


def has_parts(value: Any) -> bool:
    """Whether a value is a `DTensor` of which ranks have contributions."""
    return isinstance(value, DTensor) and any(how.is_partial() for how in value._spec.placements)


def without_parts(placements: Sequence[Placement]) -> list[Placement]:
    """`placements` under which no rank has only its contribution."""
    return [Replicate() if how.is_partial() else how for how in placements]


def added_up(value: DTensor) -> DTensor:
    """`value`, of which no rank has only its contribution."""
    return value.redistribute(value.device_mesh, without_parts(value.placements))
