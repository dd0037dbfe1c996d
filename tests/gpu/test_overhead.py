"""At world size 1, what zerofx costs over plain `torch.compile` on a GPU."""

from __future__ import annotations

import statistics

import pytest
import torch

from benchmarks.compare.contenders import CONTENDERS
from benchmarks.compare.zoo import batches, build
from tests.gpu.backends import NEEDS_CUDA, alone_over_nccl

pytestmark = NEEDS_CUDA
ROUNDS, STEPS = 15, 4


@pytest.mark.parametrize("stage", [1, 3])
def test_at_most_two_percent(stage: int) -> None:
    """The one bar that is a time: a ratio of medians in one process, in turns."""
    torch.set_float32_matmul_precision("high")
    try:
        with alone_over_nccl():
            times = times_of(["compute", f"zero{stage}"])
    finally:
        torch.set_float32_matmul_precision("highest")
    plain, ours = (statistics.median(each) for each in times)
    print(f"zero{stage}: {ours:.3f} ms, {ours / plain:.4f} of {plain:.3f} ms")
    assert ours <= 1.02 * plain


def times_of(names: list[str], model: str = "large") -> list[list[float]]:
    """Milliseconds of a step, round by round, of each contender."""
    steps = []
    for name in names:
        workload = build(model).cuda()
        data = [tuple(part.cuda() for part in batch) for batch in batches(workload, 0, STEPS)]
        step = CONTENDERS[name].prepare(workload, 1e-4)
        for batch in data:
            step(batch)
        steps.append((step, data))
    times: list[list[float]] = [[] for _ in names]
    for _ in range(ROUNDS):
        for found, (step, data) in zip(times, steps, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for batch in data:
                step(batch)
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / STEPS)
    return times
