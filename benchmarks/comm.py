"""Time the ways to gather and to reduce-scatter on this machine, and print them as a table.

    torchrun --nproc-per-node 2 -m benchmarks.comm
    torchrun --nproc-per-node 4 -m benchmarks.comm --mebibytes 1 16 64

`zerofx/cost/comm.py` chooses by these figures. Medians of several calls; every rank starts each
call together, and the slowest rank counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.runtime import collectives
from zerofx.runtime.buffers import Recycler
from zerofx.runtime.collectives import Pending
from zerofx.runtime.comm import Comm, make_comm

ALGORITHMS: tuple[Algorithm, ...] = ("native", "point_to_point")


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[0.25, 4, 64])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args(argv)
    dist.init_process_group()
    device = _device()
    group = dist.group.WORLD
    assert group is not None
    comm = make_comm(group, device)
    ways: list[Algorithm] = [way for way in ALGORITHMS if way == "native" or device.type == "cpu"]
    table = Table("full size", *(f"{what} {way}" for what in ("gather", "reduce") for way in ways))
    for size in args.mebibytes:
        numel = int(size * 2**20 / 4) // comm.size * comm.size
        full = torch.randn(numel, device=device)
        times = [_gather_ms(full, _with(comm, way), args.repeats) for way in ways]
        times += [_reduce_ms(full, _with(comm, way), args.repeats) for way in ways]
        table.add_row(f"{size:g} MiB", *(f"{value:.2f} ms" for value in times))
    if comm.rank == 0:
        Console().print(f"{comm.size} ranks, {comm.backend}, {device.type}, fp32", table)
    dist.destroy_process_group()


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def _with(comm: Comm, way: Algorithm) -> Comm:
    return Comm(comm.group, comm.backend, comm.rank, comm.ranks, Algorithms(way, way))


def _gather_ms(full: Tensor, comm: Comm, repeats: int) -> float:
    chunk = full.chunk(comm.size)[comm.rank].clone()
    return _median_ms(lambda: _finish(collectives.all_gather([full], [chunk], comm, 1)), repeats)


def _reduce_ms(full: Tensor, comm: Comm, repeats: int) -> float:
    splits, memory = [full.numel() // comm.size] * comm.size, Recycler()

    def run() -> None:
        _finish(collectives.reduce_scatter_mean([full], [splits], comm, 2, memory))

    return _median_ms(run, repeats)


def _finish(pending: Pending) -> None:
    for work in pending.works:
        work.wait()
    assert pending.finish is not None
    pending.finish()


def _median_ms(run: Callable[[], None], repeats: int) -> float:
    run()
    times: list[float] = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        spent = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(spent, op=dist.ReduceOp.MAX)
        times.append(float(spent) * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
