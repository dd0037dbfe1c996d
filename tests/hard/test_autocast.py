"""`torch.autocast` around the loop: half the bytes at stage 3, the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.hard.pair import EAGER, INDUCTOR, draw, full
from tests.hard.wire import watched
from tests.ranks import run_ranks

WIDTH = 16
BF16 = torch.bfloat16
Results = tuple[list[Tensor], float, float]


class Net(nn.Module):
    """Products that autocast lowers, and a norm that it leaves in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x)))).float().square().mean()


def _train(options: dict[str, Any], explicit: bool = False) -> Results:
    """Losses and parameters; bytes sent in the last forward and backward."""
    torch.manual_seed(0)
    model = Net()
    if explicit:
        zerofx.shard(model, zerofx.ZeroConfig(stage=3, **options))
    run = torch.compile(model, backend="zero3", options=options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Tensor] = []
    forward = backward = 0.0
    for step in range(3):
        with watched() as wire, torch.autocast("cpu", dtype=BF16):
            loss = run(draw(4, WIDTH, seed=step))
        forward = wire.sent_bytes(2)
        with watched() as wire:
            loss.backward()
        backward = wire.sent_bytes(2)
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    return [*results, *(full(param) for param in model.parameters())], forward, backward


@pytest.mark.parametrize("inner", [EAGER, INDUCTOR], ids=["eager", "inductor"])
def test_weights_travel_in_the_dtype_that_they_are_cast_to(inner: dict[str, Any]) -> None:
    options = {**inner, "memory_budget": 0}
    off = {**options, "disable": ("cast_before_gather",)}
    lowered = run_ranks(2, _train, options, timeout=220)
    plain = run_ranks(2, _train, off, timeout=220)
    low, norm = 2 * WIDTH * 64 + 64 + WIDTH, 2 * WIDTH
    for (values, forward, _), (wanted, whole, _) in zip(lowered, plain, strict=True):
        assert all(map(torch.equal, values, wanted)), "it is exact"
        assert whole == (low + norm) / 2 * 4
        assert forward == (low * 2 + norm * 4) / 2


def test_autocast_and_a_policy() -> None:
    """What the policy made bf16 autocast leaves alone, and gradients travel as the policy says."""
    options = {**EAGER, "memory_budget": 0, "param_dtype": BF16, "reduce_dtype": torch.float32}
    numel = 2 * WIDTH * 64 + 64 + 3 * WIDTH
    for values, forward, backward in run_ranks(2, _train, options, True):
        assert all(value.isfinite().all() for value in values)
        assert forward == numel / 2 * 2
        assert backward >= numel / 2 * 4
