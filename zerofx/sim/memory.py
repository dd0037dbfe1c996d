"""What the referee knows of memory."""

from __future__ import annotations

import torch
from torch import Tensor


def memory_address(value: Tensor) -> int:
    """What identifies the memory of `value`; 0 for memory of no bytes."""
    return value.untyped_storage().data_ptr()


def poison(value: Tensor) -> None:
    """Fill the memory of `value`, and so of all its views, with what no program computes."""
    whole = torch.empty(0, dtype=value.dtype).set_(value.untyped_storage())
    whole.fill_(torch.nan if value.is_floating_point() or value.is_complex() else 85)
