"""Reusable memory for gathered values.

A gather takes a slot and `free` gives it back, so that steady state allocates nothing (ZeRO, §6.3,
constant-size buffers). Idle slots are dropped rather than let the pool outgrow the most bytes that
were ever in use at once: a program's in-flight peak bounds the pool.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SLACK = 1.25


class BufferPool:
    """Slots of full values, one pool for each sharded model."""

    def __init__(self) -> None:
        self._idle: list[torch.UntypedStorage] = []
        self._used: dict[int, int] = {}
        self.peak_bytes = 0

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of `numel` undefined elements."""
        storage = self._reuse(numel * dtype.itemsize, device)
        if storage is None:
            value = torch.empty(numel, dtype=dtype, device=device)
            storage = value.untyped_storage()
        else:
            value = torch.empty(0, dtype=dtype, device=device)
            value.set_(storage, 0, (numel,), (1,))
        self._used[storage.data_ptr()] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.used_bytes())
        self._trim()
        return value

    def give_back(self, value: Tensor) -> None:
        """Return the slot that `value` views; anything else than a slot is left alone."""
        storage = value.untyped_storage()
        if self._used.pop(storage.data_ptr(), None) is not None:
            self._idle.append(storage)

    def used_bytes(self) -> int:
        """Bytes of slots that are in use."""
        return sum(self._used.values())

    def abandon(self) -> None:
        """A program stopped midway and will give nothing back; idle slots go, too."""
        self._used.clear()
        self._idle.clear()

    def _reuse(self, num_bytes: int, device: torch.device) -> torch.UntypedStorage | None:
        fits = [
            slot
            for slot in self._idle
            if slot.device == device and num_bytes <= slot.nbytes() <= _SLACK * num_bytes
        ]
        if not fits:
            return None
        best = min(fits, key=lambda slot: slot.nbytes())
        self._idle = [slot for slot in self._idle if slot is not best]
        return best

    def _trim(self) -> None:
        held = self.used_bytes() + sum(slot.nbytes() for slot in self._idle)
        while self._idle and held > self.peak_bytes:
            held -= self._idle.pop(0).nbytes()
