"""One contender, measured inside the processes that torchrun started.

    torchrun --nproc-per-node 2 -m benchmarks.compare.trial --contender zero3 --result out.json

Rank 0 writes what all ranks saw; the first rank that fails writes why.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.compare.contenders import CONTENDERS, Step
from benchmarks.compare.zoo import Batch, Workload, batches, build
from benchmarks.meters import interface_bytes, peak_bytes

LR = 3e-4


@dataclasses.dataclass(frozen=True)
class Trial:
    """What to run; times and bytes in one go, memory in another, since its meter slows steps.

    Attributes:
        contender: a name of `CONTENDERS`.
        model: a name of `MODELS`.
        device: `cpu` or `cuda`.
        warmup: steps before any is timed; their losses are compared.
        steps: steps to time.
        wire_steps: N of "bytes of 2N steps less those of N".
        interface: where bytes are counted; nothing is counted if empty.
        memory: measure memory, and nothing else.
    """

    contender: str
    model: str = "gpt"
    device: str = "cpu"
    warmup: int = 5
    steps: int = 20
    wire_steps: int = 2
    interface: str = "lo"
    memory: bool = False

    def arguments(self) -> list[str]:
        """The command line that says this."""
        return [f"--{name}={value}" for name, value in dataclasses.asdict(self).items()]


@dataclasses.dataclass
class Outcome:
    """What a trial found; what it did not look at is empty.

    Attributes:
        contender: who.
        failure: why there is nothing else, if so.
        losses: of the first steps, mean over ranks.
        step_ms: median time of a step, on the slowest rank.
        first_s: seconds from the plain model to the end of the first step.
        wire_bytes: sent per rank and step, by the counters of the interface.
        peak_bytes: most memory in a steady step, on the rank that has most.
        rest_bytes: memory between steps, there.
        num_params: parameters of the model.
        num_units: tokens or images of a step, of all ranks.
    """

    contender: str
    failure: str = ""
    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: float = 0.0
    first_s: float = 0.0
    wire_bytes: float = 0.0
    peak_bytes: int = 0
    rest_bytes: int = 0
    num_params: int = 0
    num_units: int = 0


def run(trial: Trial) -> Outcome:
    """Measure on the ranks of the default group; the same outcome on every rank."""
    device = torch.device(trial.device)
    if device.type == "cuda":
        device = torch.device("cuda", dist.get_node_local_rank())
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")  # tensor cores, as everyone trains
    model = build(trial.model)
    outcome = Outcome(
        trial.contender,
        num_params=sum(param.numel() for param in model.parameters()),
        num_units=model.num_units * dist.get_world_size(),
    )
    total = trial.warmup + trial.steps + 3 * trial.wire_steps
    data = [
        tuple(part.to(device) for part in batch)
        for batch in batches(model, dist.get_rank(), max(total, 4))
    ]
    if trial.memory:
        del model
        _weigh(trial, data, device, outcome)
    else:
        _time(trial, model.to(device), data, outcome)
    return outcome


def _time(trial: Trial, model: Workload, data: list[Batch], outcome: Outcome) -> None:
    begin = time.perf_counter()
    step = CONTENDERS[trial.contender].prepare(model, LR)
    losses = [step(data[0]).item()]
    outcome.first_s = max(_gather(time.perf_counter() - begin))
    losses += [step(batch).item() for batch in data[1 : trial.warmup]]
    outcome.losses = [statistics.fmean(ranks) for ranks in zip(*_gather(losses), strict=True)]

    timed, rest = data[trial.warmup :][: trial.steps], data[trial.warmup + trial.steps :]
    dist.barrier()
    times = [_timed(lambda batch=batch: step(batch), trial.device) for batch in timed]
    outcome.step_ms = 1e3 * max(_gather(statistics.median(times)))
    if trial.interface:
        outcome.wire_bytes = _sent_per_step(step, rest, trial)


def _timed(call: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _sent_per_step(step: Step, data: list[Batch], trial: Trial) -> float:
    """The difference of two runs, so that what the meter itself sends cancels."""
    count = trial.wire_steps
    sent = [_sent(step, part, trial.interface) for part in (data[:count], data[count:])]
    return (sent[1] - sent[0]) / count / dist.get_world_size()


def _sent(step: Step, data: Sequence[Batch], interface: str) -> int:
    """Bytes that left all hosts; one rank of each host reads the counters."""
    reads = dist.get_node_local_rank() == 0
    dist.barrier()
    before = interface_bytes(interface)
    dist.barrier()
    for batch in data:
        step(batch)
    dist.barrier()
    mine = interface_bytes(interface) - before if reads else 0
    return sum(_gather(mine))


def _weigh(trial: Trial, data: list[Batch], device: torch.device, outcome: Outcome) -> None:
    def train(mark: Callable[[], None]) -> None:
        step = CONTENDERS[trial.contender].prepare(build(trial.model).to(device), LR)
        for batch in data[:3]:
            step(batch)
        mark()
        step(data[3])

    peak, rest = _cuda_peak(train) if device.type == "cuda" else peak_bytes(train)
    outcome.peak_bytes, outcome.rest_bytes = max(_gather((peak, rest)))


def _cuda_peak(train: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    rest: list[int] = []

    def mark() -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        rest.append(torch.cuda.memory_allocated())

    train(mark)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), rest[0]


def _gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def parse(argv: Sequence[str] | None = None) -> tuple[Trial, Path]:
    """The trial of a command line, and where its outcome goes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for field in dataclasses.fields(Trial):
        kind = (lambda text: text == "True") if field.name == "memory" else type(field.default)
        required = field.name == "contender"
        parser.add_argument(
            f"--{field.name}",
            type=str if required else kind,
            required=required,
            default=None if required else field.default,
        )
    parser.add_argument("--result", type=Path, required=True)
    given = vars(parser.parse_args(argv))
    result = given.pop("result")
    return Trial(**given), result


def main(argv: Sequence[str] | None = None) -> None:
    """Run, and leave the outcome, or the reason why there is none, in a file."""
    trial, result = parse(argv)
    dist.init_process_group("nccl" if trial.device == "cuda" else "gloo")
    try:
        outcome = run(trial)
        if dist.get_rank() == 0:
            _leave(outcome, result)
    except Exception as error:
        traceback.print_exc()
        reason = (
            f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        )
        _leave(Outcome(trial.contender, failure=reason), result)
        raise SystemExit(1) from error
    dist.destroy_process_group()


def _leave(outcome: Outcome, result: Path) -> None:
    """Write it, unless a rank was here before: whoever fails later saw that one go."""
    with contextlib.suppress(FileExistsError), result.open("x") as file:
        json.dump(dataclasses.asdict(outcome), file)


if __name__ == "__main__":
    main()
