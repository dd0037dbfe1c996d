"""How fast this device computes, alone and while it communicates; measured in a moment."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerofx.cost.compute import Roofline
from zerofx.runtime.collectives import all_gather, reduce_scatter_mean
from zerofx.runtime.comm import Comm
from zerofx.runtime.pending import Pending

_ROWS, _INNER, _COLUMNS = 128, 512, 2048
_WIDE = 4096
"""Of a product that keeps a GPU busy for longer than it takes to launch."""
_LAUNCHES = 10
_LONG = 1 << 24
_REPEATS = 15
_TURNS = 31


def measure_roofline(device: torch.device) -> Roofline:
    """Operations of a matrix product, and bytes that an addition moves, per second; fp32.

    On a CPU while a core is there for each thread, whoever else asks for it.
    """
    shape = (_ROWS, _INNER, _COLUMNS) if device.type == "cpu" else (_WIDE, _WIDE, _WIDE)
    left = torch.randn(shape[:2], device=device)
    right = torch.randn(shape[1:], device=device)
    product = busy_seconds(lambda: left @ right, device)
    long, out = torch.randn(_LONG, device=device), torch.empty(_LONG, device=device)
    copy = busy_seconds(lambda: torch.add(long, 1.0, out=out), device)
    return Roofline(2 * math.prod(shape) / product, 2 * 4 * _LONG / copy)


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
        finish(pending)

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


def measure_messages(comm: Comm, device: torch.device) -> tuple[float, float]:
    """Core seconds, of all threads of this rank, for each byte sent by a gather, and a reduction.

    All ranks of `comm` call this together.
    """
    full = torch.zeros(_LONG // 4 // comm.size * comm.size, device=device)
    splits = [full.numel() // comm.size] * comm.size
    chunk = full.chunk(comm.size)[comm.rank].clone()

    def gather() -> None:
        finish(all_gather([full], [chunk], comm, 1))

    def reduce() -> None:
        finish(reduce_scatter_mean([full], [splits], comm, 2))

    sent = full.nbytes * (comm.size - 1) / comm.size
    return _working_seconds(gather, comm) / sent, _working_seconds(reduce, comm) / sent


def _working_seconds(call: Callable[[], None], comm: Comm) -> float:
    """Of all threads of this rank, for one of many calls that all ranks make."""
    call()
    dist.barrier(comm.group)
    begin = time.process_time()
    for _ in range(_REPEATS):
        call()
    dist.barrier(comm.group)
    return (time.process_time() - begin) / _REPEATS


def finish(pending: Pending) -> None:
    """Run all hops of a collective."""
    while not pending.done:
        pending.advance(lambda work: work.wait())


def ranks_per_core(comm: Comm) -> float:
    """Ranks of this node over the cores that they may use."""
    cores = getattr(os, "sched_getaffinity", None)  # on Linux only
    return comm.node_size / (len(cores(0)) if cores else os.cpu_count() or 1)


def busy_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of a call; on a CPU of `core_seconds`, elsewhere of many for one wait."""
    if device.type != "cpu":

        def many() -> None:
            for _ in range(_LAUNCHES):
                call()

        return median_seconds(many, device) / _LAUNCHES
    return statistics.median([core_seconds(call) for _ in range(_REPEATS + 1)][1:])


def core_seconds(call: Callable[[], Any]) -> float:
    """Of one call on this rank's cores, without the time in which other processes have them."""
    begin = time.process_time()
    call()
    return (time.process_time() - begin) / torch.get_num_threads()


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
