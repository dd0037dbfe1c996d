"""Memory of gathered values.

It comes from the allocator and goes back to it with `free`: activations take it next. What is freed
the allocator has at hand for the next gather, on GPUs by its cache and on CPUs since glibc is asked
to keep it (see `zerofx.runtime.host_memory`), so that steady state asks the system for nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


class GatheredMemory:
    """What gathered values of one sharded model take."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A 1-D tensor of `numel` undefined elements."""
        value = torch.empty(numel, dtype=dtype, device=device)
        self._used[value.data_ptr()] = value.nbytes
        return value

    def give_back(self, value: Tensor) -> None:
        """Nobody reads `value`, or what it views, any more; anything else is left alone."""
        self._used.pop(value.untyped_storage().data_ptr(), None)

    def used_bytes(self) -> int:
        """Bytes of values that were not given back."""
        return sum(self._used.values())

    def abandon(self) -> None:
        """A program stopped midway and will give nothing back."""
        self._used.clear()
