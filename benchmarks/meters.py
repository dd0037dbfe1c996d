"""Meters that look at zerofx from outside: live storages, and calls at the process group."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

Storages = dict[int, int]
"""Bytes by address."""


def live_storages() -> tuple[Storages, Storages]:
    """Memory that tensors hold, and memory that only bare storages hold (idle buffers)."""
    held: Storages = {}
    bare: Storages = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, Tensor):
            storage = _storage(thing)
            if storage is not None:
                held[storage.data_ptr()] = storage.nbytes()
        elif issubclass(kind, torch.UntypedStorage):
            bare[thing.data_ptr()] = thing.nbytes()
    idle = {address: size for address, size in bare.items() if address and address not in held}
    held.pop(0, None)
    return held, idle


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    # A DTensor wraps a tensor that is found by itself; fake ones hold nothing.
    if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except (RuntimeError, NotImplementedError):
        return None
    return storage


class WireMeter:
    """Counts the bytes that this rank sends, as the usual ring algorithms would.

    Attributes:
        sent: bytes so far.
        on_call: called at every collective, before it.
    """

    def __init__(self) -> None:
        self.sent = 0.0
        self.on_call: Callable[[], None] = lambda: None

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Count calls of `torch.distributed` inside."""
        with contextlib.ExitStack() as stack:
            for name, volume in _VOLUMES.items():
                if hasattr(dist, name):
                    wrapped = self._wrap(getattr(dist, name), volume)
                    stack.enter_context(patch.object(dist, name, wrapped))
            yield

    def _wrap(self, call: Callable[..., Any], volume: Callable[..., float]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.on_call()
            self.sent += volume(dist.get_world_size(kwargs.get("group")), *args)
            return call(*args, **kwargs)

        return counted


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _message(ranks: int, tensor: Tensor, *_: Any) -> float:
    return _bytes(tensor)


def _whole(ranks: int, out: Tensor, *_: Any) -> float:
    return _bytes(out) * (ranks - 1) / ranks


def _scattered(ranks: int, out: Tensor, whole: Tensor, *_: Any) -> float:
    return _bytes(whole) * (ranks - 1) / ranks


def _reduced(ranks: int, tensor: Tensor, *_: Any) -> float:
    return 2 * _bytes(tensor) * (ranks - 1) / ranks


_VOLUMES: dict[str, Callable[..., float]] = {
    "isend": _message,
    "all_gather_into_tensor": _whole,
    "all_gather_single": _whole,
    "reduce_scatter_tensor": _scattered,
    "reduce_scatter_single": _scattered,
    "all_reduce": _reduced,
    "broadcast": _whole,
}
