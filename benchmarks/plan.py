"""Predicted step times beside measured ones, as ratios.

    torchrun --nproc-per-node 2 -m benchmarks.plan
    torchrun --nproc-per-node 2 -m benchmarks.plan --model benchmarks.compare.zoo:Llama

Every rank calibrates itself right before it measures: how long its compiled segments take, how
fast its memory and matrix products are, and what a collective costs. Two predictions follow from
it: one with the times of the segments (a profile), and one with a roofline alone, as `zerofx plan`
makes it. All ranks calibrate at the same time, as they train at the same time.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn

from zerofx.config import ZeroConfig
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.memory import FP32_ADAM
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.planner import Machine, Planner
from zerofx.frontend.rehearsal import Rehearsal, lay_out, rehearse_model
from zerofx.frontend.segments import Segment, split
from zerofx.frontend.views import gathered_before
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.runtime import collectives
from zerofx.runtime.comm import make_comm
from zerofx.runtime.speed import measure_roofline, median_seconds
from zerofx.sim.timeline import simulate

Batch = tuple[Tensor, ...]
_CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Row:
    """One stage; seconds of a step.

    Attributes:
        stage: ZeRO stage.
        measured: median, on the slowest rank.
        profile: predicted from times of segments.
        roofline: predicted from the roofline.
    """

    stage: int
    measured: float
    profile: float
    roofline: float


def main(argv: Sequence[str] | None = None) -> None:
    """Calibrate, predict, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="benchmarks.compare.zoo:Gpt")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    module, _, name = args.model.partition(":")
    build: Callable[[], Any] = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    batch: Batch = build().batch(torch.Generator().manual_seed(dist.get_rank()))
    rehearsal = rehearse_model(build, lambda: (tuple(map(torch.zeros_like, batch)), {}))
    machine = Machine("cpu", _roofline(), _link())
    rows = [_row(stage, build, batch, rehearsal, machine, args.steps) for stage in (1, 2, 3)]
    if dist.get_rank() == 0:
        _print(args.model, machine, rows)
    dist.destroy_process_group()


def _row(
    stage: int,
    build: Callable[[], nn.Module],
    batch: Batch,
    rehearsal: Rehearsal,
    machine: Machine,
    steps: int,
) -> Row:
    config = ZeroConfig(stage=stage, dump="")  # pyright: ignore[reportArgumentType]
    ranks = dist.get_world_size()
    programs = rehearsal.programs(config, ranks)
    numel = sum(spec.shard_shape(0).numel() for spec in lay_out(rehearsal.params, config, ranks))
    profiled = sum(_profiled(program, programs, machine.link) for program in programs)
    # AdamW reads value, gradient and two moments, and writes all but the gradient; fp32.
    profiled = _slowest(profiled + 7 * 4 * numel / machine.roofline.bytes_per_second)

    def inputs(size: int, length: int) -> tuple[Batch, dict[str, Tensor]]:
        return tuple(value.new_zeros((size, *value.shape[1:])) for value in batch), {}

    rows = batch[0].shape[0]
    planner = Planner(build, inputs, config, machine, FP32_ADAM, ranks, rows, 0, whole=True)
    roofline = planner.plan((stage,)).stages[stage].times.step
    return Row(stage, _measured(stage, build(), batch, steps), profiled, roofline)


def _profiled(program: Program, programs: tuple[Program, Program], link: Link) -> float:
    """Seconds of a program whose segments are compiled and timed one by one."""
    compiler = SegmentCompiler("inductor", {})
    seconds: dict[fx.Node, float] = {}
    backward = program.region is Region.BACKWARD
    times: dict[str, float] = {}
    for piece in split(program.graph):
        if isinstance(piece, Segment) and piece.outputs:
            run = compiler.compile(piece, is_backward=backward)
            if piece.key not in times:
                times[piece.key] = _segment_seconds(piece, run)
            seconds[piece.outputs[-1]] = times[piece.key]
    already = gathered_before(programs)

    def on_link(start: fx.Node) -> float:
        return 0.0 if start in already else link.seconds(start)

    return simulate(program, lambda node: seconds.get(node, 0.0), on_link).seconds


def _segment_seconds(segment: Segment, run: Callable[[list[Any]], Any]) -> float:
    values = [_value_for(node.meta["val"]) for node in segment.inputs]
    return median_seconds(lambda: run(list(values)), _CPU)


def _value_for(fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    return made.normal_() if made.is_floating_point() else made.zero_()


def _roofline() -> Roofline:
    mine = measure_roofline(_CPU)
    return Roofline(1 / _slowest(1 / mine.flops), 1 / _slowest(1 / mine.bytes_per_second))


def _link() -> Link:
    group = dist.group.WORLD
    assert group is not None
    comm = make_comm(group, _CPU, dist.get_world_size())

    def gather(numel: int) -> float:
        full = torch.zeros(numel * comm.size)
        chunk = full.chunk(comm.size)[comm.rank].clone()

        def once() -> None:
            pending = collectives.all_gather([full], [chunk], comm, 1)
            for work in pending.works:
                work.wait()

        return _slowest(median_seconds(once, _CPU))

    small, large = 1 << 8, 1 << 21
    short, long = gather(small), gather(large)
    share = comm.size - 1
    rate = 4 * share * (large - small) / max(1e-9, long - short)
    return Link(rate, max(0.0, short - 4 * share * small / rate))


def _measured(stage: int, model: nn.Module, batch: Batch, steps: int) -> float:
    step = torch.compile(model, backend=f"zero{stage}")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train() -> None:
        step(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    dist.barrier()
    seconds = _slowest(median_seconds(train, _CPU, steps))
    torch.compiler.reset()
    return seconds


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def _print(model: str, machine: Machine, rows: Sequence[Row]) -> None:
    table = Table("stage", "measured", "by profile", "by roofline", box=None)
    for row in rows:
        ratios = [f"{value / row.measured:.2f}" for value in (row.profile, row.roofline)]
        table.add_row(f"zero{row.stage}", f"{1e3 * row.measured:.1f} ms", *ratios)
    roofline, link = machine.roofline, machine.link
    head = (
        f"{model}, {dist.get_world_size()} ranks; predictions as a share of what was measured. "
        f"{roofline.flops / 1e9:.0f} GFLOPS, memory {roofline.bytes_per_second / 1e9:.1f} GB/s, "
        f"link {link.bytes_per_second / 1e9:.2f} GB/s and {1e6 * link.latency:.0f} µs"
    )
    Console().print(head, table)


if __name__ == "__main__":
    main()
