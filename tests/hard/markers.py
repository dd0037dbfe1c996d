"""Markers that raise, to show that programs do not call them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def markers_raise() -> Iterator[None]:
    """Eager kernels of the markers raise; programs do not call them."""
    library = torch.library.Library("zerofx", "IMPL")

    def refuse(*args: Any) -> Tensor:
        raise AssertionError("a marker communicates")

    for name in ("unshard", "reduce_grad"):
        library.impl(name, refuse, "CPU")
    try:
        yield
    finally:
        library._destroy()
