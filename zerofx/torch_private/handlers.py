"""What `DTensor` asks before it does an operation in torch's way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code
from torch.distributed.tensor import DTensor

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes an operation and its arguments, and gives its result."""

_HANDLERS: dict[Any, Handler] = DTensor._op_dispatcher._custom_op_handlers


def handle(ops: Iterable[Any], handler: Handler) -> None:
    """Have `DTensor` leave operations to `handler`.

    In what a compiled function runs op by op, Dynamo would compile the handler, which is slow, and
    lose handlers: it writes dictionaries back as it saw them when it compiled.
    """
    untraced: Any = torch.compiler.disable(handler)

    def call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Asking is 0.5 µs cheaper than turning Dynamo off where nothing is being compiled.
        if get_eval_frame_callback() is None:
            return handler(op, args, kwargs)
        return untraced(op, args, kwargs)

    skip_code(call.__code__)
    _HANDLERS.update(dict.fromkeys(ops, call))


def torchs_way(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does where it asks no handler; for handlers that have nothing to say."""
    handler = _HANDLERS.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            _HANDLERS[op] = handler
