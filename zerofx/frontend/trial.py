"""What Python costs on this machine: small models train as any model does, and a step is timed.

Their kernels and messages are next to nothing, so a step is Python, and waking up. Four models that
differ in one thing each tell what that thing costs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.config import ZeroConfig
from zerofx.cost.compute import Roofline
from zerofx.cost.host import Host
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine, machine_of
from zerofx.cost.processor import FREE_CORES, Processor
from zerofx.cost.tables import CommTable
from zerofx.frontend.rehearsal import rehearse_model
from zerofx.frontend.views import gathered_before
from zerofx.ir.ops import STARTS, WAITS, computes
from zerofx.ir.view import aliased_inputs
from zerofx.runtime.comm import Comm
from zerofx.runtime.speed import (
    measure_contention,
    measure_messages,
    measure_roofline,
    ranks_per_core,
    seconds_of,
)

_WIDTH, _SHALLOW, _DEEP, _EXTRA = 32, 4, 16, 8
_WIDE = 4096
_ADAMW_BYTES = 28
"""Of an fp32 parameter: value, gradient and two moments are read; all but the gradient written."""


class _Stack(nn.Module):
    """Linear layers with `extra` more kernels behind each."""

    def __init__(self, depth: int, extra: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            for _ in range(self.extra):
                x = x * 0.5
        return x.sum()


@dataclasses.dataclass(frozen=True)
class _Trial:
    depth: int = _SHALLOW
    extra: int = 0
    apart: bool = False
    width: int = _WIDTH

    def build(self) -> nn.Module:
        return _Stack(self.depth, self.extra, self.width)

    @property
    def config(self) -> ZeroConfig:
        size = 1 if self.apart else 1 << 30
        return ZeroConfig(inner="eager", min_shard_numel=0, bucket_bytes=size, dump="")


@dataclasses.dataclass(frozen=True)
class _Step:
    """Seconds of a step.

    Attributes:
        computing: forward and backward.
        updating: the optimizer's step.
        working: of all threads, in forward and backward.
    """

    computing: float
    updating: float
    working: float


_TRIALS = (_Trial(), _Trial(extra=_EXTRA), _Trial(apart=True), _Trial(_DEEP))


def measure_machine(comm: Comm, device: torch.device, table: CommTable, steps: int = 20) -> Machine:
    """This machine, as the ranks of the default group find it when all of them work at once.

    Ranks that share processors or memory see their share of them. All ranks call this together.

    Args:
        comm: the group.
        device: of this rank.
        table: costs of its collectives.
        steps: of each model that is trained.
    """
    dist.barrier(comm.group)
    processor = _shared_cores(comm, device)
    mine = measure_roofline(device)
    roofline = Roofline(
        1 / (slowest(1 / mine.flops, device) * processor.crowding),
        1 / (slowest(1 / mine.bytes_per_second, device) * processor.crowding),
    )
    machine = machine_of(device.type, table)
    contention = measure_contention(comm, device)
    host = measure_host(device, machine.link, contention, processor, steps)
    return dataclasses.replace(machine, roofline=roofline, host=host)


def _shared_cores(comm: Comm, device: torch.device) -> Processor:
    """What messages ask of the cores; nothing on a GPU, whose kernels leave them alone."""
    if device.type != "cpu":
        return FREE_CORES
    gathered, reduced = (slowest(each, device) for each in measure_messages(comm, device))
    return Processor(
        ranks_per_core(comm), torch.get_num_threads(), gathered=gathered, reduced=reduced
    )


def measure_host(
    device: torch.device, link: Link, contention: float, processor: Processor, steps: int = 20
) -> Host:
    """Train on all ranks of the default group, which call this together.

    Args:
        device: of this rank.
        link: as measured; its latency is a part of what a collective takes in a step.
        contention: see `Host`.
        processor: what messages ask of it.
        steps: of each model, of which the lower quartile counts.
    """
    found = [_train(trial, device, steps) for trial in _TRIALS]
    counts = [_counts(trial) for trial in _TRIALS]
    program, collective, member, kernel = _costs(counts, [each.computing for each in found])
    update = max(0.0, (found[-1].updating - found[0].updating) / (_DEEP - _SHALLOW))
    wide = _train(_Trial(depth=1, width=_WIDE), device, steps).updating
    moved = _ADAMW_BYTES * _WIDE**2 / dist.get_world_size()
    return Host(
        program,
        max(0.0, collective - link.latency),
        member,
        kernel,
        update=update,
        update_rate=moved / max(wide - update, wide / 2),
        contention=contention,
        processor=_with_python(processor, _costs(counts, [each.working for each in found])),
        runs_ahead=device.type == "cuda",
    )


def _with_python(processor: Processor, costs: tuple[float, float, float, float]) -> Processor:
    program, collective, member, kernel = costs
    return dataclasses.replace(
        processor, program=program, collective=collective, member=member, kernel=kernel
    )


def _costs(
    counts: Sequence[tuple[int, int, int, int]], seconds: Sequence[float]
) -> tuple[float, float, float, float]:
    """Seconds of a program, a collective, a member and a kernel; none is negative."""
    (programs, starts, waits, kernels), extra, apart, deep = counts
    base = seconds[0]
    kernel = max(0.0, (seconds[1] - base) / (extra[3] - kernels))
    collective = max(0.0, (seconds[2] - base) / (apart[1] - starts))
    deeper = seconds[3] - base - kernel * (deep[3] - kernels) - collective * (deep[1] - starts)
    member = max(0.0, deeper / (deep[2] - waits))
    rest = base - kernel * kernels - collective * starts - member * waits
    return max(0.0, rest / programs), collective, member, kernel


def _counts(trial: _Trial) -> tuple[int, int, int, int]:
    """Programs, collectives, members and kernels of a step."""
    rehearsal = rehearse_model(trial.build, lambda: ((torch.zeros(2, trial.width),), {}), "eager")
    programs = rehearsal.programs(trial.config, dist.get_world_size())
    silent = gathered_before(programs)
    starts = [s for p in programs for s in p.calls(*STARTS) if s not in silent]
    waits = [wait for p in programs for wait in p.calls(*WAITS)]
    kernels = [
        node
        for program in programs
        for node in program.graph.nodes
        if computes(node) and not aliased_inputs(node)
    ]
    return len(programs), len(starts), len(waits), len(kernels)


def _train(trial: _Trial, device: torch.device, steps: int) -> _Step:
    model = trial.build().to(device)
    options: dict[str, Any] = {"config": trial.config}
    run = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(2, trial.width, device=device)
    times: list[tuple[float, float, float]] = []
    for _ in range(steps + 3):
        begin = time.process_time()
        computing = seconds_of(lambda: run(batch).backward(), device)
        working = time.process_time() - begin
        times.append((computing, seconds_of(optimizer.step, device), working))
        optimizer.zero_grad()
    torch.compiler.reset()
    return _Step(*(slowest(_typical(each), device) for each in zip(*times[3:], strict=True)))


def _typical(seconds: Sequence[float]) -> float:
    """The lower quartile: what disturbs a step makes it longer, never shorter."""
    return sorted(seconds)[len(seconds) // 4]


def slowest(seconds: float, device: torch.device) -> float:
    """The most that any rank says."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)
