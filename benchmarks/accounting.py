"""What each stage holds and sends, measured and beside its formula.

    python -m benchmarks.accounting                      # prints the table
    python -m benchmarks.accounting --markdown docs/accounting.md

Trains a small GPT in fp32 with Adam on gloo ranks of this machine. Memory is the sum of live
storages; traffic is counted at the calls of `torch.distributed` (`benchmarks.meters`), so neither
comes from zerofx's own books.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.gpt import Gpt
from benchmarks.meters import WireMeter, live_storages

STAGES = (0, 1, 2, 3)
_BYTES = 4
_INTRODUCTION = """# What each stage holds and sends

Made by `python -m benchmarks.accounting --markdown docs/accounting.md`: a GPT with Ψ = {psi:.1f} M
parameters, fp32, Adam, gloo; {made}. Numbers are per rank and in units of Ψ (bytes
for memory, parameters for traffic): *measured / formula*. Memory is the sum of live storages,
traffic is counted at the calls of `torch.distributed`; neither comes from zerofx's own books.

- **at rest**: after an optimizer step, gradients still held. Stages 1 and 2 hold the same there.
- **peak in backward**: the most alive at any collective of a backward. Stage 1 holds all full
  gradients when it starts to exchange them, which is what its formula 8Ψ+8Ψ/W counts; stage 2 holds
  one of them at a time. Values of one layer and what is in flight are in the measurement, and in no
  formula.
- **sent**: bytes per optimizer step, divided by 4Ψ(W−1)/W; with k = 2 micro-batches too (stages 0
  and 1 with `accumulate=2`).

Padding: a parameter is split by rows, as `DTensor` and FSDP2 do, so the last shard is padded. On
SmolLM2-135M it costs nothing at W = 2, 4, 8, 16, 32, 64, less than 2 % at every W up to 24, and at
most 6 % (W = 63) at any W up to 64.

With `secondary_shards` stage 3 holds 4Ψ/L more at rest, L ranks on a node (2Ψ/L in bf16;
[secondary_shards.md](secondary_shards.md)).
"""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One rank of one stage; bytes.

    Attributes:
        stage: ZeRO stage.
        num_ranks: W.
        num_params: Ψ.
        at_rest: alive after a step, gradients held.
        peak: the most alive at any collective of a backward.
        buffers: idle buffers at rest: none.
        sent: by number of micro-batches, bytes sent per optimizer step.
    """

    stage: int
    num_ranks: int
    num_params: int
    at_rest: int
    peak: int
    buffers: int
    sent: dict[int, float]

    def in_psi(self, size: float) -> float:
        """Bytes as a multiple of Ψ."""
        return size / self.num_params

    def sent_in_psi(self, micro_batches: int) -> float:
        """Traffic in parameters, as a multiple of Ψ(W−1)/W."""
        share = (self.num_ranks - 1) / self.num_ranks
        return self.sent[micro_batches] / (_BYTES * self.num_params * share)


def expected_at_rest(stage: int, num_ranks: int, compute_bytes: int = 4) -> float:
    """Bytes per parameter after a step: parameters, gradients and Adam's two moments in fp32.

    With a `param_dtype` of 2 bytes, stages 1 and 2 hold a full copy in it beside the fp32 shards.
    """
    if stage in (1, 2) and compute_bytes < 4:
        return compute_bytes + 16 / num_ranks
    full = {0: 16, 1: 4, 2: 4, 3: 0}[stage]
    return full + (16 - full) / num_ranks


def expected_peak(stage: int, num_ranks: int, compute_bytes: int = 4) -> float:
    """Bytes per parameter in backward, without activations and what is in flight."""
    # Stage 1 has all full gradients, and no sharded ones yet, when it starts to exchange them.
    if stage == 1:
        return 2 * compute_bytes + (12 if compute_bytes < 4 else 8) / num_ranks
    return expected_at_rest(stage, num_ranks, compute_bytes)


def expected_sent(stage: int, micro_batches: int, compute_bytes: int = 4) -> float:
    """Parameters of 4 bytes sent per step, as a multiple of Ψ(W−1)/W."""
    count = {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    return count * compute_bytes / 4


def measure(
    stage: int,
    micro_batches: Sequence[int] = (1, 2),
    width: int = 256,
    depth: int = 6,
    make: Callable[..., nn.Module] = Gpt,
    **options: Any,
) -> Measurement:
    """Train one stage on the ranks of the default group, and look at this rank.

    Args:
        stage: ZeRO stage.
        micro_batches: of a step, each of them measured.
        width: of the model.
        depth: its layers.
        make: called with both.
        **options: of the backend.
    """
    size = {"width": width, "depth": depth}
    runs = {count: _Run(stage, count, partial(make, **size), options) for count in micro_batches}
    for run in runs.values():
        run.train()
    first = runs[micro_batches[0]]
    sent = {count: run.sent for count, run in runs.items()}
    return Measurement(
        stage,
        dist.get_world_size(),
        first.num_params,
        first.at_rest,
        first.peak,
        first.buffers,
        sent,
    )


class _Run:
    """A few steps of training, the last one looked at."""

    def __init__(
        self,
        stage: int,
        micro_batches: int,
        make: Callable[[], nn.Module],
        options: dict[str, Any],
    ) -> None:
        # Strictly by the formula: by default stage 3 sends less, since it keeps a bucket.
        budget = 0 if stage == 3 else None
        strict = {"inner": "eager", "min_shard_numel": 0, "memory_budget": budget}
        self._options: dict[str, Any] = {**strict, **options}
        if stage < 2:
            self._options["accumulate"] = micro_batches
        self._stage = stage
        self._micro_batches = micro_batches
        self._make = make
        self.num_params = self.at_rest = self.peak = self.buffers = 0
        self.sent = 0.0

    def train(self, steps: int = 3) -> None:
        gc.collect()
        gc.freeze()  # what is there already is not found below
        torch.manual_seed(0)
        model = self._make()
        self.num_params = sum(param.numel() for param in model.parameters())
        compiled = torch.compile(model, backend=f"zero{self._stage}", options=self._options)
        opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        for _ in range(steps - 1):
            self._step(compiled, opt, WireMeter())
        meter = WireMeter()
        with meter.attached():
            self._step(compiled, opt, meter)
        self.sent = meter.sent
        grads = [param.grad for param in model.parameters()]  # a tensor is found once read
        gc.collect()
        self.at_rest, self.buffers = _live_bytes()
        del grads
        torch.compiler.reset()

    def _step(
        self, compiled: Callable[..., Tensor], opt: torch.optim.Optimizer, meter: WireMeter
    ) -> None:
        opt.zero_grad()
        for _ in range(self._micro_batches):
            loss = compiled(torch.randint(1024, (1, 16)))
            meter.on_call = self._look
            loss.backward()
            meter.on_call = _nothing
        opt.step()

    def _look(self) -> None:
        if self._micro_batches == 1:
            self.peak = max(self.peak, _live_bytes()[0])


def _live_bytes() -> tuple[int, int]:
    """Bytes that tensors hold, and bytes of idle buffers."""
    held, idle = live_storages()
    return sum(held.values()), sum(idle.values())


def _nothing() -> None:
    """Look at nothing."""


def _serve(rank: int, num_ranks: int, rendezvous: str, results: str, depth: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
    )
    measured = [measure(stage, depth=depth) for stage in STAGES]
    if rank == 0:
        torch.save(measured, results)
    dist.destroy_process_group()


def measure_all(num_ranks: int, depth: int) -> list[Measurement]:
    """All stages on new ranks of this machine; what rank 0 saw."""
    with tempfile.TemporaryDirectory() as folder:
        results = os.path.join(folder, "results")
        arguments = (num_ranks, os.path.join(folder, "rendezvous"), results, depth)
        mp.start_processes(_serve, arguments, nprocs=num_ranks, start_method="spawn")
        return torch.load(results, weights_only=False)


COLUMNS = ("stage", "W", "at rest", "peak in backward", "sent", "sent, k = 2")


def row(found: Measurement) -> tuple[str, ...]:
    """One line of the table."""
    stage, ranks = found.stage, found.num_ranks
    pairs = (
        (found.in_psi(found.at_rest), expected_at_rest(stage, ranks)),
        (found.in_psi(found.peak), expected_peak(stage, ranks)),
    )
    traffic = tuple(
        f"{found.sent_in_psi(count):.2f} / {expected_sent(stage, count):g}" for count in (1, 2)
    )
    memory = tuple(f"{got:.2f} / {want:g}" for got, want in pairs)
    return f"zero{stage}", str(ranks), *memory, *traffic


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="W")
    parser.add_argument("--depth", type=int, default=6, help="layers of the GPT")
    parser.add_argument("--markdown", type=Path, help="page to write")
    options = parser.parse_args(arguments)
    found = [one for ranks in options.ranks for one in measure_all(ranks, options.depth)]
    psi = found[0].num_params / 1e6
    table = Table(*COLUMNS, title=f"Ψ = {psi:.1f} M parameters; measured / formula, in Ψ")
    for one in found:
        table.add_row(*row(one))
    Console().print(table)
    if options.markdown:
        lines = [COLUMNS, ("---",) * len(COLUMNS), *map(row, found)]
        body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        made = f"{date.today()}, torch {torch.__version__}"
        options.markdown.write_text(f"{_INTRODUCTION.format(psi=psi, made=made)}\n{body}\n")


if __name__ == "__main__":
    main()
