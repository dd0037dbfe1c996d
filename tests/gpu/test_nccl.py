"""Training on one CUDA device: NCCL at world size 1, and two ranks that share it over gloo."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.gpu.backends import GLOO, NEEDS_CUDA, alone_over_nccl
from tests.models import batch, make
from tests.ranks import run_ranks

pytestmark = NEEDS_CUDA


def losses(model: nn.Module, run: Callable[..., Tensor], rank: int, **adam: Any) -> list[float]:
    """Three steps of AdamW on `rank`'s batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **adam)
    found: list[float] = []
    for step in range(3):
        inputs = [value.cuda() for value in batch("gpt", rank, step, torch.float32)]
        loss = run(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def train_shared(stage: int, **adam: Any) -> tuple[list[float], list[float]]:
    """Two ranks, one device: zeroN against DistributedDataParallel."""
    torch.cuda.set_device(0)
    plain = make("gpt", torch.float32).cuda()
    model = copy.deepcopy(plain)
    options = {"inner": "eager", "min_shard_numel": 0}
    rank = dist.get_rank()
    got = losses(model, torch.compile(model, backend=f"zero{stage}", options=options), rank, **adam)
    return got, losses(plain, nn.parallel.DistributedDataParallel(plain), rank, **adam)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_share_a_device_over_gloo(stage: int) -> None:
    for got, want in run_ranks(2, train_shared, stage, backend=GLOO):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_capturable_optimizer(stage: int) -> None:
    """Its counts of steps lie on the device, plain tensors beside sharded moments."""
    for got, want in run_ranks(2, train_shared, stage, capturable=True, backend=GLOO):
        assert got == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("stage", [0, 3])
def test_nccl_at_world_size_one(stage: int, inner: str) -> None:
    with alone_over_nccl():
        plain = make("gpt", torch.float32).cuda()
        model = copy.deepcopy(plain)
        compiled = torch.compile(model, backend=f"zero{stage}", options={"inner": inner})
        assert losses(model, compiled, 0) == pytest.approx(losses(plain, plain, 0), rel=1e-4)


def test_events_time_a_program(tmp_path: Path) -> None:
    with alone_over_nccl():
        model = make("gpt", torch.float32).cuda()
        options = {"inner": "eager", "dump": str(tmp_path), "measure": 1}
        losses(model, torch.compile(model, backend="zero3", options=options), 0)
    for region in ("forward", "backward"):
        (path,) = tmp_path.glob(f"graph*/{region}/measured.json")
        found = json.loads(path.read_text())
        spans = [span for span in found["spans"] if span["stream"] == "compute"]
        assert spans and found["seconds"] > 0
        assert all(0 <= span["begin"] <= span["end"] <= found["seconds"] for span in spans)
