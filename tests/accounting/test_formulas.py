"""What each stage holds and sends is what the papers say."""

from __future__ import annotations

import pytest

from benchmarks.accounting import (
    Measurement,
    expected_at_rest,
    expected_peak,
    expected_sent,
    measure,
)
from tests.accounting.stack import LAYER, Stack
from tests.ranks import run_ranks


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_and_traffic(stage: int) -> None:
    for found in run_ranks(2, measure, stage, (1,), depth=8, make=Stack, timeout=220):
        _check(found)
    for found in run_ranks(2, measure, stage, (2,), depth=1, make=Stack, timeout=220):
        _check_sent(found)


def test_four_ranks() -> None:
    for found in run_ranks(4, measure, 3, (1,), depth=8, make=Stack, timeout=220):
        _check(found)


def _check(found: Measurement) -> None:
    stage, ranks = found.stage, found.num_ranks
    at_rest = expected_at_rest(stage, ranks)
    # Adam's step counters, the batch and random states are a few hundred bytes.
    assert found.in_psi(found.at_rest) == pytest.approx(at_rest, abs=0.01), found
    # On top come, counted in layers, the weights of this one and the next, the gradients of this
    # one, of the one whose reduction begins and of the one whose ends, and what these two receive;
    # and the activations.
    peak = expected_peak(stage, ranks)
    in_flight = (5 + 2 * (ranks - 1) / ranks) * 4 * LAYER / found.num_params + 0.6
    assert peak - 4 / ranks - 0.01 <= found.in_psi(found.peak) <= peak + in_flight, found
    _check_sent(found)
    assert found.buffers == 0


def _check_sent(found: Measurement) -> None:
    for count in found.sent:
        wanted = expected_sent(found.stage, count)
        assert found.sent_in_psi(count) == pytest.approx(wanted, rel=0.01)
