"""What a policy of bf16 holds and sends, measured from outside."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accounting import (
    Measurement,
    expected_at_rest,
    expected_peak,
    expected_sent,
    measure,
)
from tests.ranks import run_ranks

DEPTH = 8
LAYER_SHARE = 12 * 256 * 256 / 6_557_952
BF16 = 2


def _measured(stage: int) -> list[Measurement]:
    options = {"param_dtype": torch.bfloat16}
    return run_ranks(2, measure, stage, (1,), depth=DEPTH, timeout=220, **options)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_traffic(stage: int) -> None:
    """4Ψ+12Ψ/W and 16Ψ/W at stages 1 and 3 (ZeRO §5); 2Ψ+16Ψ/W at stage 2.

    The paper counts gradients of 2 bytes at stage 2, hence 14Ψ/W; but torch's Adam refuses
    gradients of another dtype than its parameters, so shards of them are in fp32.
    """
    for found in _measured(stage):
        at_rest = expected_at_rest(stage, found.num_ranks, BF16)
        assert found.in_psi(found.at_rest) == pytest.approx(at_rest, abs=0.01), found
        peak = expected_peak(stage, found.num_ranks, BF16)
        # As in fp32, weights and gradients of a few layers, here of 2 bytes; activations.
        in_flight = 6 * BF16 * LAYER_SHARE + 0.6
        assert peak - 0.01 <= found.in_psi(found.peak) <= peak + in_flight
        sent = expected_sent(stage, 1, BF16)
        assert found.sent_in_psi(1) == pytest.approx(sent, rel=0.01)


def test_the_formulas() -> None:
    for ranks in (2, 8, 64):
        assert expected_peak(1, ranks, BF16) == 4 + 12 / ranks
        assert expected_at_rest(2, ranks, BF16) == 2 + 16 / ranks
        assert expected_at_rest(3, ranks, BF16) == 16 / ranks
