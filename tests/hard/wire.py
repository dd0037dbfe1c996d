"""What goes over the wire, counted where zerofx calls `torch.distributed`."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

_CALLS = (
    "isend",
    "all_reduce",
    "broadcast",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_to_all_single",
)


@dataclass
class Wire:
    """Calls so far: the name of each, the tensor's elements and its bytes; and all dtypes.

    `sent_to` has the bytes of messages by the global rank that they went to.
    """

    calls: list[tuple[str, int, int]] = field(default_factory=list)
    dtypes: set[torch.dtype] = field(default_factory=set)
    sent_to: Counter[int] = field(default_factory=Counter)

    def count(self, name: str = "") -> int:
        """Number of calls of one kind, or of all."""
        return sum(1 for call, _, _ in self.calls if name in ("", call))

    def sent_bytes(self, num_ranks: int) -> float:
        """Bytes that this rank sent in messages and ring all-reduces."""
        share = {"isend": 1.0, "all_reduce": 2 * (num_ranks - 1) / num_ranks}
        return sum(share.get(call, 0.0) * num_bytes for call, _, num_bytes in self.calls)

    def numels(self, name: str) -> list[int]:
        """Elements of each call of one kind, in order."""
        return [numel for call, numel, _ in self.calls if call == name]


@contextlib.contextmanager
def watched(before: Callable[[], None] = lambda: None) -> Iterator[Wire]:
    """Record every call while it is open; `before` runs before each."""
    wire = Wire()
    with contextlib.ExitStack() as stack:
        for name in _CALLS:
            if hasattr(dist, name):
                real = getattr(dist, name)
                stack.enter_context(patch.object(dist, name, _watch(real, name, wire, before)))
        yield wire


def _watch(real: Any, name: str, wire: Wire, before: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        before()
        wire.calls.append((name, tensor.numel(), tensor.nbytes))
        wire.dtypes.add(tensor.dtype)
        if name == "isend":
            wire.sent_to[args[0]] += tensor.nbytes
        return real(tensor, *args, **kwargs)

    return call
