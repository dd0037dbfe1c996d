"""Differences between ranks that are none: each trains on."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from tests.fingerprint.chain import Chain, fit, native_collectives
from tests.ranks import run_ranks


def _fit_slowly(native: bool) -> list[float]:
    """Rank 1 oversleeps `hang_timeout`, before a forward and between forward and backward."""
    late = dist.get_rank() == 1

    def oversleep(step: int) -> None:
        if late and step == 1:
            time.sleep(3.0)

    if native:
        with native_collectives():
            return fit(Chain(), 3, before_step=oversleep)
    return fit(Chain(), 3, before_step=oversleep)


@pytest.mark.parametrize("native", [False, True])
def test_a_slow_rank_is_waited_for(native: bool) -> None:
    first, second = run_ranks(2, _fit_slowly, native, timeout=60)
    assert first == second, "the same data, so the same losses"


def _fit_with_caches() -> tuple[list[float], int, int]:
    """Train once to fill the cache, then again, with an empty one on rank 0."""
    fit(Chain(), 3, inner="inductor")
    torch.compiler.reset()
    counters.clear()
    with fresh_cache() if dist.get_rank() == 0 else contextlib.nullcontext():
        losses = fit(Chain(), 3, inner="inductor")
    found = counters["inductor"]
    return losses, found["fxgraph_cache_hit"], found["fxgraph_cache_miss"]


def test_one_rank_has_a_warm_cache() -> None:
    (first, hits, misses), (second, more_hits, fewer_misses) = run_ranks(
        2, _fit_with_caches, timeout=110
    )
    assert first == second
    assert misses > 0 and fewer_misses == 0 and more_hits > hits
