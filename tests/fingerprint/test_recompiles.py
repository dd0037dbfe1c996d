"""One rank may compile anew alone; a rank that may not do so any more says so."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.fingerprint.chain import Chain, fit
from tests.ranks import RanksFailed, run_ranks


def _fit_with_new_length() -> tuple[list[float], int]:
    def rows(step: int) -> int:
        return 7 if step == 1 and dist.get_rank() == 1 else 4

    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    losses = fit(Chain(), 3, steps=4, rows=rows)
    return losses, torch._dynamo.utils.counters["stats"]["unique_graphs"] - before


def test_one_rank_recompiles_alone() -> None:
    (first, graphs), (second, more) = run_ranks(2, _fit_with_new_length, timeout=220)
    assert (graphs, more) == (1, 2)
    assert first[0] == second[0] and len(first) == len(second) == 4


def _fit_past_the_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        rank = dist.get_rank()
        fit(Chain(), 3, steps=4, rows=lambda step: 4 + (step if rank == 1 else 0))


def test_the_recompile_limit_is_an_error() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _fit_past_the_limit, timeout=60)
    failure = failed.value.failures[1]
    assert failure.kind == "UnsupportedError"
    assert "Chain.forward was recompiled too often" in failure.message
    assert "layers.0.weight" in failure.message and "recompile_limit" in failure.message
