"""Measure what collectives cost in a group."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.cost.tables import Collective, CommCost, CommTable, fit
from zerofx.runtime.collectives import (
    all_gather,
    all_reduce_mean,
    all_to_all,
    reduce_scatter_mean,
)
from zerofx.runtime.comm import Comm, topology_of
from zerofx.runtime.pending import Pending
from zerofx.runtime.quantized import exchange_two_hop
from zerofx.runtime.speed import finish, seconds_of

SIZES = (64 << 10, 1 << 20, 16 << 20, 64 << 20)
_TRIAL = 4 << 20
_PAYS = 0.8
_NUMBERS = (torch.float32, torch.bfloat16)
_DTYPES: dict[Collective, tuple[torch.dtype, ...]] = {
    "all_gather": _NUMBERS,
    "reduce_scatter": _NUMBERS,
    "all_reduce": _NUMBERS,  # of replicated parameters
    "all_to_all": (torch.uint8,),  # of codes
}


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
    for collective, algorithm, dtype in ways_of(comm):
        points = [
            _point(collective, algorithm, comm, size, dtype, device, repeats) for size in sizes
        ]
        costs.append(cost_of(collective, algorithm, dtype, points))
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


def ways_of(comm: Comm) -> Iterator[tuple[Collective, Algorithm, torch.dtype]]:
    """What can serve a group: messages need gloo and host memory, two hops several nodes."""
    algorithms: list[Algorithm] = ["native"]
    if comm.algorithms.all_gather != "native":
        algorithms.append("point_to_point")
        if comm.allows_two_hops:
            algorithms.append("two_hop")
    # An all-reduce that goes by messages is a gather: see `all_reduce_mean`.
    serving = {"all_reduce": algorithms[:1], "all_to_all": algorithms[:2]}
    for collective, dtypes in _DTYPES.items():
        for algorithm, dtype in itertools.product(serving.get(collective, algorithms), dtypes):
            yield collective, algorithm, dtype


def cost_of(
    collective: Collective,
    algorithm: Algorithm,
    dtype: torch.dtype,
    points: Sequence[tuple[float, float]],
) -> CommCost:
    """The entry for `points`, bytes that a rank sends and seconds."""
    return CommCost(collective, algorithm, str(dtype).removeprefix("torch."), *fit(points))


def sent_bytes(collective: Collective, full_bytes: int, num_ranks: int) -> float:
    """Bytes that a rank sends in a collective over tensors of `full_bytes`."""
    once = full_bytes * (num_ranks - 1) / num_ranks
    return 2 * once if collective == "all_reduce" else once


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
    sent = sent_bytes(collective, full.nbytes, comm.size)
    return sent, _median(_starting(collective, full, way), comm, device, repeats)


def _starting(collective: Collective, full: Tensor, comm: Comm) -> Callable[[], Pending]:
    rows = full.view(comm.size, -1)
    chunk = rows[comm.rank].clone()
    starting: dict[Collective, Callable[[], Pending]] = {
        "all_gather": lambda: all_gather([full], [chunk], comm, 1),
        "reduce_scatter": lambda: reduce_scatter_mean(
            [full], [[chunk.numel()] * comm.size], comm, 2
        ),
        "all_reduce": lambda: all_reduce_mean([full], comm, 3),
        "all_to_all": lambda: _exchange(rows, comm, 4),
    }
    return starting[collective]


def _exchange(rows: Tensor, comm: Comm, tag: int) -> Pending:
    """By the hops of reduced codes, which send as many bytes in two as in one."""
    if comm.allows_two_hops:
        return exchange_two_hop(rows, lambda arrived: arrived[0], comm, tag)
    return all_to_all(rows, range(comm.size), comm.rank, comm, tag)


def _median(start: Callable[[], Pending], comm: Comm, device: torch.device, repeats: int) -> float:
    times: list[float] = []
    for _ in range(repeats + 1):
        dist.barrier(comm.group)
        spent = torch.tensor(seconds_of(lambda: finish(start()), device), device=device)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=comm.group)
        times.append(float(spent))
    return statistics.median(times[1:])
