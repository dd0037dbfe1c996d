"""Op by op nothing is reordered: 2 ranks agree bitwise, 4 ranks up to the order of the sum."""

from __future__ import annotations

import pytest
import torch

from tests.numerics.cover import Row, pairwise
from tests.numerics.runs import (
    CLIP,
    MODELS,
    SETTINGS,
    STAGES,
    parity,
    references,
    zero,
    zero_and_reference,
)
from tests.oracle import Result, assert_same
from tests.ranks import run_ranks

OPTIONS = {"inner": "eager"}


def _of_ranks(by_rank: list[list[Result]]) -> list[list[Result]]:
    """Results by setting, then by rank."""
    return [list(results) for results in zip(*by_rank, strict=True)]


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_agree_bitwise(name: str) -> None:
    """With DDP; with clipping with `fully_shard`, which sums norms over shards as zerofx does."""
    ddp = _of_ranks(run_ranks(2, references, name, "ddp", SETTINGS))
    sharded = _of_ranks(run_ranks(2, references, name, "fully_shard", SETTINGS))
    for stage in STAGES:
        got = _of_ranks(run_ranks(2, zero, name, stage, SETTINGS, timeout=220, **OPTIONS))
        for number, (_, clip) in enumerate(SETTINGS):
            want = sharded if clip and stage > 0 else ddp
            # DDP gives every rank rank 0's buffers before a forward; FSDP2 leaves them alone.
            assert_same(got[number][:1], want[number][:1], rtol=0, keys=["buffers"])
            keys = ["losses", "params", "grads"]
            if clip or stage == 0:
                keys.append("norms")
                assert min(want[number][0]["norms"]) > CLIP, "something is clipped"
            assert_same(got[number], want[number], rtol=0, keys=keys)


FOUR_RANKS = pairwise(
    {"name": MODELS, "stage": STAGES, "optimizer": ("sgd", "adamw"), "clip": (None, CLIP)},
    lambda row: parity(row) == 1,
)


@pytest.mark.parametrize("name", MODELS)
def test_four_ranks_agree(name: str) -> None:
    for row in FOUR_RANKS:
        if row["name"] == name:
            _four_ranks(row)


def _four_ranks(row: Row) -> None:
    setting = (row["optimizer"], row["clip"])
    job = (zero_and_reference, row["name"], row["stage"], setting, "ddp", torch.float32)
    got, want = zip(*run_ranks(4, *job, timeout=220, **OPTIONS), strict=True)
    assert_same(got, want, rtol=1e-6)
