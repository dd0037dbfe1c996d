"""What time it is once devices have done what they were asked to."""

from __future__ import annotations

import time

import torch


def now() -> float:
    """Seconds since some moment, after the GPU has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
