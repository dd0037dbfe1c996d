"""Memory seen from outside: which storages are alive right now."""

from __future__ import annotations

import gc
from collections.abc import Iterable

import torch
from torch import Tensor


def storages() -> dict[int, tuple[int, torch.dtype]]:
    """Bytes and dtype of every storage that a Python tensor shows, by address."""
    found: dict[int, tuple[int, torch.dtype]] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and type(thing) in (Tensor, torch.nn.Parameter):
            storage = thing.untyped_storage()
            if storage.nbytes():
                found[storage.data_ptr()] = (storage.nbytes(), thing.dtype)
    return found


def count_of_size(sizes: Iterable[int]) -> int:
    """Number of live storages whose size in bytes is one of `sizes`."""
    wanted = set(sizes)
    return sum(num_bytes in wanted for num_bytes, _ in storages().values())
