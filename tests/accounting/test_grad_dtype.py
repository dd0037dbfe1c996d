"""ZeRO §5's 2Ψ+14Ψ/W: gradients of stage 2 wait for the optimizer in 16 bits."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from benchmarks.meters import live_storages
from tests.accounting.stack import Stack
from tests.ranks import run_ranks

BF16 = torch.bfloat16


def _held(stage: int) -> dict[str, float]:
    """Bytes per parameter that live after a backward, when the optimizer begins, and after it."""
    gc.collect()
    gc.freeze()
    model = Stack()
    policy = {"param_dtype": BF16, "grad_dtype": BF16, "memory_budget": 0 if stage == 3 else None}
    options = {"inner": "eager", "min_shard_numel": 0, **policy}
    run = torch.compile(model, backend=f"zero{stage}", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    num_params = sum(param.numel() for param in model.parameters())
    found: dict[str, float] = {}

    def look(moment: str) -> None:
        grads = [param.grad for param in model.parameters()]  # a tensor is found once read
        gc.collect()
        found[moment] = sum(live_storages()[0].values()) / num_params
        del grads

    def begin(*_: Any) -> None:
        look("step begins")

    optimizer.register_step_pre_hook(begin)
    for _ in range(3):
        optimizer.zero_grad()
        run(torch.randint(1024, (1, 16))).backward()
        look("after backward")
        optimizer.step()
    look("after step")
    torch.compiler.reset()
    return found


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("stage", "full"), [(1, 2), (2, 2), (3, 0)])
def test_memory(stage: int, full: int, num_ranks: int) -> None:
    """2Ψ+14Ψ/W at stages 1 and 2 once gradients are reduced, 14Ψ/W at stage 3.

    A step casts gradients to fp32, and frees the full copy for them, which it puts out of date.
    """
    for found in run_ranks(num_ranks, _held, stage):
        assert found["after backward"] == pytest.approx(full + 14 / num_ranks, abs=0.02)
        assert found["after step"] == pytest.approx(14 / num_ranks, abs=0.02)
        assert found["step begins"] == pytest.approx(16 / num_ranks, abs=0.02)
