"""Which ranks take part in this run, and on which device each of them computes."""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

GIB = 2**30


@dataclass(frozen=True)
class World:
    """This rank's place among the ranks, and its device."""

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for all: prints, draws and writes small files."""
        return self.rank == 0

    @contextlib.contextmanager
    def first_on_node(self) -> Iterator[bool]:
        """Let one rank per machine run the block first: it fills the cache for the others."""
        if self.local_rank == 0:
            yield True
        dist.barrier()
        if self.local_rank != 0:
            yield False

    def gather(self, *numbers: float) -> torch.Tensor:
        """The numbers of every rank, as a table with one row per rank."""
        table = torch.zeros(self.size, len(numbers), dtype=torch.float64, device=self.device)
        table[self.rank] = torch.tensor(numbers)
        dist.all_reduce(table)
        return table.cpu()

    def memory_bytes(self) -> int:
        """Memory that this rank holds now: the device's, or the process's where it is a CPU."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return resident_bytes()


def resident_bytes() -> int:
    """Resident memory of this process now; its peak on systems that tell only that."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@contextlib.contextmanager
def join() -> Iterator[World]:
    """Join the process group that torchrun describes, or found one of a single rank."""
    if torch.cuda.is_available():
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        device = torch.device("cpu")
    transport = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(transport)
    else:
        dist.init_process_group(transport, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(
            rank=dist.get_rank(),
            size=dist.get_world_size(),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            device=device,
        )
    finally:
        dist.destroy_process_group()
