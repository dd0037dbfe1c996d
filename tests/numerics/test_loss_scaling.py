"""`torch.amp.GradScaler` over sharded gradients: what one process would do, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import zerofx
from tests.device import DEVICE
from tests.hard.pair import full
from tests.ranks import run_ranks

STEPS, WIDTH, FP16 = 20, 8, torch.float16
# By step, the rank whose batch overflows and the output, and so the row and its owner, where.
OVERFLOWS = {2: (0, 0), 3: (1, 0), 7: (0, WIDTH - 1), 8: (1, WIDTH - 1), 15: (1, 0)}


class Model(nn.Module):
    """A small parameter, replicated and never infinite, comes before a sharded one."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.linspace(-1, 1, WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        large = (self.linear(x) * weights).float().square().mean()
        return large + (self.small * x).float().square().mean()


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Model().to(DEVICE)


def _batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(2 * step + rank)
    weights = torch.ones(WIDTH)
    if OVERFLOWS.get(step, (-1, 0))[0] == rank:
        weights[OVERFLOWS[step][1]] = 6e4
    return torch.randn(4, WIDTH, generator=made).to(DEVICE), weights.to(DEVICE)


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=4)


def _loop(model: nn.Module, backward: Any, clip: float | None) -> tuple[list[float], list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler, scales = _scaler(), []
    for step in range(STEPS):
        backward(step, scaler)
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [full(param) for param in model.parameters()]


def one_process(clip: float | None, autocast: bool) -> tuple[list[float], list[Tensor]]:
    model = _model()

    def loss(x: Tensor, weights: Tensor) -> Tensor:
        if autocast:
            with torch.autocast(DEVICE, dtype=FP16):
                return model(x, weights)
        low = {name: param.to(FP16) for name, param in model.named_parameters()}
        return functional_call(model, low, (x.to(FP16), weights.to(FP16)))

    def backward(step: int, scaler: torch.amp.GradScaler) -> None:
        for rank in range(2):
            scaler.scale(loss(*_batch(step, rank))).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= 2

    return _loop(model, backward, clip)


def sharded(stage: int, clip: float | None, autocast: bool) -> tuple[list[float], list[Tensor]]:
    model = _model()
    precision: dict[str, Any] = {}
    if not autocast:
        precision = {"param_dtype": FP16, "reduce_dtype": torch.float32}
    options = {"inner": "eager", "min_shard_numel": 16, **precision}
    zerofx.shard(model, zerofx.ZeroConfig(stage=stage, **options))  # type: ignore[arg-type]
    run = torch.compile(model, backend=f"zero{stage}", options=options)

    def backward(step: int, scaler: torch.amp.GradScaler) -> None:
        with torch.autocast(DEVICE, dtype=FP16, enabled=autocast):
            loss = run(*_batch(step, dist.get_rank()))
        scaler.scale(loss).backward()

    return _loop(model, backward, clip)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_scales_and_skipped_steps_are_those_of_one_process(stage: int, autocast: bool) -> None:
    wanted = one_process(None, autocast)
    assert len(set(wanted[0])) > 3, "the scale moves"
    halved = [step for step in range(1, STEPS) if wanted[0][step] < wanted[0][step - 1]]
    assert halved == list(OVERFLOWS)
    for scales, params in run_ranks(2, sharded, stage, None, autocast, timeout=120):
        assert scales == wanted[0]
        for got, want in zip(params, wanted[1], strict=True):
            assert torch.equal(got, want)


def test_clipping_sees_unscaled_gradients() -> None:
    wanted = one_process(0.1, False)
    for scales, params in run_ranks(2, sharded, 3, 0.1, False, timeout=120):
        assert scales == wanted[0]
        for got, want in zip(params, wanted[1], strict=True):
            assert torch.allclose(got, want, rtol=1e-5, atol=1e-7)
