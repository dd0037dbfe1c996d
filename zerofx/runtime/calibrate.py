"""Measure what collectives cost in a group."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.cost.tables import Collective, CommCost, CommTable, fit
from zerofx.runtime.collectives import all_gather, reduce_scatter_mean
from zerofx.runtime.comm import Comm, topology_of
from zerofx.runtime.pending import Pending

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
DTYPES = (torch.float32, torch.bfloat16)
_TRIAL = 4 << 20
_PAYS = 0.8
_COLLECTIVES: tuple[Collective, ...] = ("all_gather", "reduce_scatter")


def calibrate(
    comm: Comm,
    device: torch.device,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    report: Callable[[CommCost], None] = lambda cost: None,
) -> CommTable:
    """Time every algorithm that serves `comm`; all its ranks call this together.

    Args:
        comm: the group.
        device: of the tensors.
        sizes: full bytes of the transfers.
        repeats: calls of each, of which the median counts, on the slowest rank.
        report: called with each entry.
    """
    costs: list[CommCost] = []
    for collective in _COLLECTIVES:
        for algorithm in algorithms_of(comm):
            for dtype in DTYPES:
                points = [
                    _point(collective, algorithm, comm, size, dtype, device, repeats)
                    for size in sizes
                ]
                costs.append(CommCost(collective, algorithm, _name(dtype), *fit(points)))
                report(costs[-1])
    return CommTable(topology_of(comm, device), tuple(costs))


def two_hops_pay(comm: Comm, device: torch.device) -> bool:
    """Try how gathers of `comm` are quicker; all its ranks call this together.

    Two hops halve what crosses between nodes, and end with a hop that nothing hides: they have to
    be quicker by a fifth. Values depend on how reductions travel (sums of another order), and not
    on how gathers do.
    """
    ways: tuple[Algorithm, ...] = ("point_to_point", "two_hop")
    tries = [
        [_point("all_gather", way, comm, _TRIAL, torch.float32, device, 1)[1] for way in ways]
        for _ in range(3)
    ]
    one, two = (min(seconds) for seconds in zip(*tries, strict=True))  # others use the cores, too
    return two < _PAYS * one


def algorithms_of(comm: Comm) -> Iterator[Algorithm]:
    """Those that can serve a group: messages need gloo and host memory, two hops several nodes."""
    yield "native"
    if comm.algorithms.all_gather != "native":
        yield "point_to_point"
        if 1 < comm.node_size < comm.size:
            yield "two_hop"


def _point(
    collective: Collective,
    algorithm: Algorithm,
    comm: Comm,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
) -> tuple[float, float]:
    """Bytes that a rank sends, and seconds."""
    numel = max(1, size // dtype.itemsize // comm.size) * comm.size
    full = torch.zeros(numel, dtype=dtype, device=device)
    way = dataclasses.replace(comm, algorithms=Algorithms(algorithm, algorithm))
    run = _gather(full, way) if collective == "all_gather" else _reduce(full, way)
    return full.nbytes * (comm.size - 1) / comm.size, _median(run, comm, device, repeats)


def _gather(full: Tensor, comm: Comm) -> Callable[[], Pending]:
    chunk = full.chunk(comm.size)[comm.rank].clone()
    return lambda: all_gather([full], [chunk], comm, 1)


def _reduce(full: Tensor, comm: Comm) -> Callable[[], Pending]:
    splits = [full.numel() // comm.size] * comm.size
    return lambda: reduce_scatter_mean([full], [splits], comm, 2)


def _median(start: Callable[[], Pending], comm: Comm, device: torch.device, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        dist.barrier(comm.group)
        begin = time.perf_counter()
        pending = start()
        while not pending.done:
            pending.advance(lambda work: work.wait())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        spent = torch.tensor(time.perf_counter() - begin, device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=comm.group)
        times.append(float(spent))
    return statistics.median(times[1:])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
