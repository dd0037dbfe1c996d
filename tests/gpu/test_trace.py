"""A profile of training shows gathers and reductions under the kernels that compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare.zoo import Gpt
from tests.gpu.backends import BACKENDS, NEEDS_CUDA
from tests.ranks import run_ranks

pytestmark = [*NEEDS_CUDA, pytest.mark.parametrize("backend", BACKENDS)]


def traced(path: Path) -> None:
    torch.manual_seed(0)
    model = Gpt(width=512, depth=4, length=256, batch=8).cuda()
    run = torch.compile(model, backend="zero3", options={"inner": "eager"})
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    made = torch.Generator().manual_seed(dist.get_rank())

    def step() -> None:
        run(*(part.cuda() for part in model.batch(made))).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        profiled.export_chrome_trace(str(path))


def under_compute(events: list[dict[str, Any]], word: str) -> float:
    """Share of the time of collectives named so in which another stream computes."""
    spans = [each for each in events if each.get("ph") == "X"]
    kernels = [each for each in spans if each.get("cat") == "kernel"]
    moving = [each for each in kernels if word in each["name"].lower().replace("_", "")]
    if not moving:  # gloo's collectives are spans on the host
        moving = [each for each in spans if f"gloo:{word}" in each["name"].replace("_", "")]
    assert moving, sorted({each["name"] for each in spans})
    computing = [each for each in kernels if "nccl" not in each["name"].lower()]
    total = covered = 0.0
    for span in moving:
        begin, end = span["ts"], span["ts"] + span["dur"]
        total += span["dur"]
        parts = ((max(begin, k["ts"]), min(end, k["ts"] + k["dur"])) for k in computing)
        covered += sum(stop - start for start, stop in parts if stop > start)
    return covered / total


def test_collectives_overlap_with_compute(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    run_ranks(2, traced, path, timeout=240, backend=backend)
    events = json.loads(path.read_text())["traceEvents"]
    for word in ("allgather", "reducescatter" if "nccl" in backend else "allreduce"):
        share = under_compute(events, word)
        print(f"{backend}: {share:.0%} of {word} under kernels")
        assert share > 0
