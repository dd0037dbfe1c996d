"""Predicted step times beside measured ones, as ratios.

    torchrun --nproc-per-node 2 -m benchmarks.plan
    torchrun --nproc-per-node 4 -m benchmarks.plan gpt:1 small:3 gpt:3:bfloat16

A case is a model, a stage and perhaps a `param_dtype`. The machine is measured first, by all ranks
at once, as `zerofx bench machine` does. Two predictions follow: one with the times of each case's
compiled segments (a profile), and one with a roofline alone, as `zerofx plan --machine` makes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx

from benchmarks.compare import zoo
from zerofx.config import Stage, ZeroConfig
from zerofx.cost.machine import Machine
from zerofx.cost.memory import FP32_ADAM
from zerofx.errors import ZeroFxError
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.planner import Planner
from zerofx.frontend.rehearsal import rehearse_model
from zerofx.frontend.segments import Segment, split
from zerofx.frontend.trial import measure_machine, slowest
from zerofx.frontend.views import Programs, gathered_before
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.view import aliased_inputs
from zerofx.runtime.calibrate import calibrate
from zerofx.runtime.comm import make_comm
from zerofx.runtime.speed import core_seconds, median_seconds
from zerofx.sim.timeline import simulate

Batch = tuple[Tensor, ...]
Compiled = tuple[fx.Node, Segment, Callable[[list[Any]], Any]]
"""Last kernel of a segment, the segment, and how to run it."""

CPU = torch.device("cpu")
_ROUNDS = 3
CASES = ("gpt:1", "gpt:2", "gpt:3", "small:3", "cnn:2", "llama:3", "mlp:3", "gpt:3:bfloat16")


class Mlp(zoo.Workload):
    """6.3 M parameters, which few samples share: more bytes than arithmetic."""

    num_units = 32

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU()) for _ in range(6))
        )

    def blocks(self) -> list[torch.nn.Module]:
        """Each layer."""
        return list(self.layers)

    def batch(self, generator: torch.Generator) -> Batch:
        """Noise."""
        return (torch.randn(self.num_units, 1024, generator=generator),)

    def forward(self, x: Tensor) -> Tensor:
        """Mean square of what comes out."""
        return self.layers(x).square().mean()


MODELS: dict[str, Callable[[], zoo.Workload]] = {
    **zoo.MODELS,
    "mlp": Mlp,
    "small": lambda: zoo.Gpt(width=256, depth=4),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained: a model of `MODELS`, by a stage, computing in a dtype."""

    name: str
    stage: Stage
    dtype: torch.dtype | None

    @property
    def config(self) -> ZeroConfig:
        """The options that ranks train with."""
        return ZeroConfig(stage=self.stage, param_dtype=self.dtype, dump="")


@dataclasses.dataclass(frozen=True)
class Row:
    """One case; seconds of a step.

    Attributes:
        case: as it was written.
        measured: least median of three rounds, on the slowest rank.
        profile: predicted from times of segments.
        roofline: predicted from the roofline.
    """

    case: str
    measured: float
    profile: float
    roofline: float


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the machine, then predict and measure each case; print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    case = "MODEL:STAGE[:DTYPE]"
    parser.add_argument("cases", nargs="*", type=_known, default=CASES, metavar=case)
    parser.add_argument("--steps", type=int, default=18)
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    comm = make_comm(group, CPU, dist.get_world_size())
    machine = measure_machine(comm, CPU, calibrate(comm, CPU, repeats=3))
    rows: list[Row] = []
    for text in args.cases:
        rows.append(_row(text, machine, args.steps))
        if dist.get_rank() == 0:
            last = rows[-1]
            ratios = f"{last.profile / last.measured:.2f} {last.roofline / last.measured:.2f}"
            print(f"{text} {1e3 * last.measured:.1f} ms {ratios}", flush=True)
    if dist.get_rank() == 0:
        _print(machine, rows)
    dist.destroy_process_group()


def _known(text: str) -> str:
    """The text of a case; others are refused before the machine is measured."""
    try:
        found = _case(text).config if text.partition(":")[0] in MODELS else None
    except (AttributeError, ValueError, ZeroFxError):
        found = None
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no case; models: {', '.join(MODELS)}")
    return text


def _case(text: str) -> Case:
    name, stage, *dtype = text.split(":")
    return Case(name, int(stage), getattr(torch, dtype[0]) if dtype else None)  # pyright: ignore[reportArgumentType]


def _row(text: str, machine: Machine, steps: int) -> Row:
    case = _case(text)
    build, ranks = MODELS[case.name], dist.get_world_size()
    batch: Batch = build().batch(torch.Generator().manual_seed(dist.get_rank()))

    def inputs(size: int, length: int) -> tuple[Batch, dict[str, Tensor]]:
        return tuple(value.new_zeros((size, *value.shape[1:])) for value in batch), {}

    rows = batch[0].shape[0]
    planner = Planner(build, inputs, case.config, machine, FP32_ADAM, ranks, rows, 0, whole=True)
    times = planner.plan((case.stage,)).stages[case.stage].times
    rehearsal = rehearse_model(build, lambda: inputs(rows, 0), cast=case.dtype)
    programs = rehearsal.programs(case.config, ranks)
    segments, train = _compiled(programs), _training(case, batch)
    profiles: list[float] = []
    found: list[float] = []
    # In turns, so that whatever else the machine does slows both.
    for _ in range(_ROUNDS):
        dist.barrier()
        profile = _simulated(programs, _profile(segments), machine) + times.update
        profiles.append(slowest(profile, CPU))
        dist.barrier()
        found.append(slowest(median_seconds(train, CPU, steps // _ROUNDS), CPU))
    torch.compiler.reset()
    return Row(text, min(found), min(profiles), times.step)


def _simulated(programs: Programs, seconds: dict[fx.Node, float], machine: Machine) -> float:
    """Seconds of both programs, given those of their segments."""
    already = gathered_before(programs)
    # What launches a kernel is a part of its segment's time.
    processor = dataclasses.replace(machine.host.processor, kernel=0.0)
    host = dataclasses.replace(machine.host, kernel=0.0, processor=processor)

    def on_link(program: Program, start: fx.Node) -> float:
        return 0.0 if start in already else machine.link_seconds(program, start)

    def compute(node: fx.Node) -> float:
        return processor.crowding * seconds.get(node, 0.0)

    return sum(
        simulate(program, compute, functools.partial(on_link, program), host=host).seconds
        for program in programs
    )


def _compiled(programs: Programs) -> list[Compiled]:
    """Segments that compute, with their last kernels."""
    compiler = SegmentCompiler("inductor", {})
    found: list[Compiled] = []
    for program in programs:
        backward = program.region is Region.BACKWARD
        for piece in split(program.graph):
            if not isinstance(piece, Segment):
                continue
            kernels = [kernel for out in piece.outputs if (kernel := _kernel_of(out)) is not None]
            if kernels:
                (run,) = compiler.compile([piece], is_backward=backward)
                found.append((kernels[-1], piece, run))
    return found


def _profile(segments: Sequence[Compiled]) -> dict[fx.Node, float]:
    """Core seconds of each segment on the slowest rank, by its last kernel.

    One runs after the other, as in a step, so that values are where a step finds them: in memory,
    not in the cache of a core that has just read them.
    """
    values = [[_value_for(node.meta["val"]) for node in piece.inputs] for _, piece, _ in segments]
    rounds: list[list[float]] = []
    for _ in range(1 + _ROUNDS):
        dist.barrier()
        rounds.append(
            [
                core_seconds(functools.partial(run, list(given)))
                for (_, _, run), given in zip(segments, values, strict=True)
            ]
        )
    typical = torch.tensor(rounds[1:]).median(dim=0).values
    dist.all_reduce(typical, dist.ReduceOp.MAX)
    return {
        kernel: seconds for (kernel, _, _), seconds in zip(segments, typical.tolist(), strict=True)
    }


def _kernel_of(value: fx.Node) -> fx.Node | None:
    """Who wrote the memory of a segment's output; `None` if it is a view of an input."""
    while sources := aliased_inputs(value):
        value = sources[0]
    return value if value.op == "call_function" else None


def _value_for(fake: Any) -> Any:
    if not isinstance(fake, Tensor):
        return fake
    # As many elements as its strides reach; expanded dimensions have none of their own.
    reach = sum((n - 1) * by for n, by in zip(fake.shape, fake.stride(), strict=True)) + 1
    values = torch.randn(reach) if fake.is_floating_point() else torch.zeros(reach)
    return values.to(fake.dtype).as_strided(fake.shape, fake.stride())


def _training(case: Case, batch: Batch) -> Callable[[], None]:
    """A step, after a few."""
    model = MODELS[case.name]()
    options: dict[str, Any] = {} if case.dtype is None else {"param_dtype": case.dtype}
    step = torch.compile(model, backend=f"zero{case.stage}", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def train() -> None:
        step(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        train()
    return train


def _print(machine: Machine, rows: Sequence[Row]) -> None:
    table = Table("case", "measured", "by profile", "by roofline", box=None)
    ratios = [[row.profile / row.measured, row.roofline / row.measured] for row in rows]
    for row, pair in zip(rows, ratios, strict=True):
        table.add_row(row.case, f"{1e3 * row.measured:.1f} ms", *(f"{value:.2f}" for value in pair))
    medians = [statistics.median(column) for column in zip(*ratios, strict=True)]
    table.add_row("median", "", *(f"{value:.2f}" for value in medians))
    Console(width=120).print(
        f"{dist.get_world_size()} ranks; predictions as a share of what was measured.\n"
        f"{machine.roofline}\n{machine.links}\n{machine.host}",
        table,
    )


if __name__ == "__main__":
    main()
