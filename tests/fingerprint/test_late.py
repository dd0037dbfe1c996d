"""Differences between ranks that are none: each trains on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

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


def _fit_with_cache(folder: str) -> list[float]:
    """Rank 1 has a warm Inductor cache, rank 0 a cold one."""
    cache = Path(folder) / f"rank{dist.get_rank()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    if dist.get_rank() == 1:
        cold = cache.with_name("cold")
        cold.mkdir(exist_ok=True)
        assert any(cache.rglob("*.so")), "the cache is warm"
    return fit(Chain(), 3, inner="inductor")


def _warm(folder: str) -> list[float]:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "rank1")
    return fit(Chain(), 3, inner="inductor")


def test_one_rank_has_a_warm_cache(tmp_path: Path) -> None:
    losses = run_ranks(2, _warm, str(tmp_path), timeout=100)
    assert run_ranks(2, _fit_with_cache, str(tmp_path), timeout=100) == losses
    assert any((tmp_path / "rank0").rglob("*.so"))
