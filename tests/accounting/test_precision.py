"""What a policy of bf16 holds and sends, measured from outside."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.accounting import (
    Measurement,
    expected_at_rest,
    expected_peak,
    expected_sent,
    measure,
)
from benchmarks.meters import live_storages
from tests.accounting.stack import LAYER, Stack
from tests.ranks import run_ranks

DEPTH = 8
BF16 = 2


def _measured(stage: int) -> list[Measurement]:
    options = {"param_dtype": torch.bfloat16, "make": Stack}
    return run_ranks(2, measure, stage, (1,), depth=DEPTH, timeout=220, **options)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_and_traffic(stage: int) -> None:
    """4Ψ+12Ψ/W and 16Ψ/W at stages 1 and 3 (ZeRO §5); 2Ψ+16Ψ/W at stage 2.

    The paper counts gradients of 2 bytes at stage 2, hence 14Ψ/W; that is `grad_dtype`, since
    torch's Adam refuses gradients of another dtype than its parameters.
    """
    for found in _measured(stage):
        at_rest = expected_at_rest(stage, found.num_ranks, BF16)
        assert found.in_psi(found.at_rest) == pytest.approx(at_rest, abs=0.01), found
        peak = expected_peak(stage, found.num_ranks, BF16)
        # As in fp32, weights and gradients of a few layers, here of 2 bytes; activations.
        in_flight = 6 * BF16 * LAYER / found.num_params + 0.6
        assert peak - 0.01 <= found.in_psi(found.peak) <= peak + in_flight
        sent = expected_sent(stage, 1, BF16)
        assert found.sent_in_psi(1) == pytest.approx(sent, rel=0.01)


def test_stage_2_on_four_ranks() -> None:
    options = {"param_dtype": torch.bfloat16, "make": Stack}
    for found in run_ranks(4, measure, 2, (1,), depth=2, timeout=220, **options):
        assert found.in_psi(found.at_rest) == pytest.approx(2 + 16 / 4, abs=0.01), found


@pytest.mark.parametrize("kind", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_adam_takes_no_gradient_in_16_bits(kind: dict[str, bool]) -> None:
    """Why a step sees `grad_dtype` cast; if it fails one day, that may end."""
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad_dtype = torch.bfloat16
    (weight * 2).sum().backward()
    assert weight.grad is not None and weight.grad.dtype is torch.bfloat16
    with pytest.raises(RuntimeError, match=r"BFloat16|same dtype except `step`"):
        torch.optim.AdamW([weight], **kind).step()  # pyright: ignore[reportArgumentType]


def _stepped_inside_backward() -> float:
    """Bytes per parameter at rest, if each gradient is applied and freed as soon as it is there."""
    gc.collect()
    gc.freeze()
    model = Stack()
    options = {"inner": "eager", "min_shard_numel": 0, "param_dtype": torch.bfloat16}
    run = torch.compile(model, backend="zero2", options=options)
    with torch.no_grad():
        run(torch.randint(1024, (1, 16)))  # shards the model
    for param in model.parameters():
        optimizer = torch.optim.Adam([param])

        def step(_: torch.Tensor, optimizer: torch.optim.Adam = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        run(torch.randint(1024, (1, 16))).backward()
    gc.collect()
    at_rest = sum(live_storages()[0].values()) / sum(map(torch.Tensor.numel, model.parameters()))
    torch.compiler.reset()
    return at_rest


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_an_optimizer_in_backward_holds_no_gradients(num_ranks: int) -> None:
    for at_rest in run_ranks(num_ranks, _stepped_inside_backward):
        assert at_rest == pytest.approx(2 + 12 / num_ranks, abs=0.01)


def test_the_formulas() -> None:
    for ranks in (2, 8, 64):
        assert expected_peak(1, ranks, BF16) == 4 + 12 / ranks
        assert expected_at_rest(2, ranks, BF16) == 2 + 16 / ranks
        assert expected_at_rest(3, ranks, BF16) == 16 / ranks
