"""How fast this device computes, alone and while it communicates; measured in a moment."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerofx.cost.compute import Roofline
from zerofx.runtime.collectives import all_gather
from zerofx.runtime.comm import Comm

_ROWS, _INNER, _COLUMNS = 128, 512, 2048
_LONG = 1 << 24
_REPEATS = 15
_TURNS = 31


def measure_roofline(device: torch.device) -> Roofline:
    """Operations of a matrix product, and bytes that an addition moves, per second; fp32."""
    left = torch.randn(_ROWS, _INNER, device=device)
    right = torch.randn(_INNER, _COLUMNS, device=device)
    product = median_seconds(lambda: left @ right, device)
    long, out = torch.randn(_LONG, device=device), torch.empty(_LONG, device=device)
    copy = median_seconds(lambda: torch.add(long, 1.0, out=out), device)
    return Roofline(2 * _ROWS * _INNER * _COLUMNS / product, 2 * 4 * _LONG / copy)


def measure_contention(comm: Comm, device: torch.device) -> float:
    """The share of a gather's time that products running meanwhile lose to it; 0 to 1.

    All ranks of `comm` call this together.
    """
    full = torch.zeros(_LONG // 4 // comm.size * comm.size, device=device)
    chunk = full.chunk(comm.size)[comm.rank].clone()
    left = torch.randn(_ROWS, _INNER, device=device)
    right = torch.randn(_INNER, _COLUMNS, device=device)

    def gather(products: int) -> None:
        dist.barrier(comm.group)
        pending = all_gather([full], [chunk], comm, 1)
        multiply(products)
        while not pending.done:
            pending.advance(lambda work: work.wait())

    def multiply(products: int) -> None:
        for _ in range(products):
            torch.mm(left, right)

    alone = median_seconds(lambda: gather(0), device)
    # Enough to outlast the gather on every rank.
    products = 1 + int(4 * alone / median_seconds(lambda: multiply(1), device))

    def compute() -> None:
        dist.barrier(comm.group)
        multiply(products)

    # In turns: whatever else the machine does slows both.
    lost = statistics.median(
        seconds_of(lambda: gather(products), device) - seconds_of(compute, device)
        for _ in range(_TURNS)
    )
    share = torch.tensor(lost / alone, device=device)
    dist.all_reduce(share, group=comm.group)
    return float((share / comm.size).clamp(0, 1))


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int = _REPEATS) -> float:
    """Of one call; the first, which may allocate, does not count."""
    return statistics.median([seconds_of(call, device) for _ in range(repeats + 1)][1:])


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call, until the device is done with it."""
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
