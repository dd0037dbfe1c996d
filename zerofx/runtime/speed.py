"""How fast this device computes: the two numbers of a roofline, measured in a moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from zerofx.cost.compute import Roofline

_ROWS, _INNER, _COLUMNS = 128, 512, 2048
_LONG = 1 << 24
_REPEATS = 15


def measure_roofline(device: torch.device) -> Roofline:
    """Operations of a matrix product, and bytes that an addition moves, per second; fp32."""
    left = torch.randn(_ROWS, _INNER, device=device)
    right = torch.randn(_INNER, _COLUMNS, device=device)
    product = median_seconds(lambda: left @ right, device)
    long, out = torch.randn(_LONG, device=device), torch.empty(_LONG, device=device)
    copy = median_seconds(lambda: torch.add(long, 1.0, out=out), device)
    return Roofline(2 * _ROWS * _INNER * _COLUMNS / product, 2 * 4 * _LONG / copy)


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int = _REPEATS) -> float:
    """Of one call; the first, which may allocate, does not count."""
    seconds: list[float] = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:])
