"""Op by op nothing is reordered: 2 ranks agree bitwise, 3 ranks up to the order of the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.numerics.cover import Row, pairwise
from tests.numerics.runs import (
    CLIP,
    MODELS,
    MORE_TRANSFORMERS,
    SETTINGS,
    STAGES,
    parity,
    references,
    zero,
    zero_and_reference,
)
from tests.oracle import assert_same
from tests.ranks import run_ranks

OPTIONS = {"inner": "eager"}
CLIPPED = tuple(setting for setting in SETTINGS if setting[1])


def _computed(job: Any, name: str, how: Any, settings: Any, **options: Any) -> dict[Any, Any]:
    """Results of each rank, by setting."""
    # Three steps: with fresh state, with the state of one step, and with all that is reused.
    by_rank = run_ranks(2, job, name, how, settings, timeout=220, steps=3, **options)
    return dict(zip(settings, zip(*by_rank, strict=True), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_agree_bitwise(name: str) -> None:
    """With DDP; with clipping with `fully_shard`, which sums norms over shards as zerofx does."""
    ddp = _computed(references, name, "ddp", SETTINGS)
    sharded = ddp | _computed(references, name, "fully_shard", CLIPPED)
    for stage in STAGES:
        for setting, got in _computed(zero, name, stage, SETTINGS, **OPTIONS).items():
            want = sharded[setting] if stage > 0 else ddp[setting]
            # DDP gives every rank rank 0's buffers before a forward; FSDP2 leaves them alone.
            assert_same(got[:1], want[:1], rtol=0, keys=["buffers"])
            keys = ["losses", "params", "grads"]
            if setting in CLIPPED or stage == 0:
                keys.append("norms")
                assert min(want[0]["norms"]) > CLIP, "something is clipped"
            assert_same(got, want, rtol=0, keys=keys)


SHAPES = [name for name in MODELS if name not in MORE_TRANSFORMERS]
"""Three ranks split rows unevenly, or not at all; the other transformers have the rows of `gpt`."""
THREE_RANKS = pairwise(
    {"name": SHAPES, "stage": STAGES, "optimizer": ("sgd", "adamw"), "clip": (None, CLIP)},
    lambda row: parity(row) == 1,
)


@pytest.mark.parametrize("name", SHAPES)
def test_three_ranks_agree(name: str) -> None:
    for row in THREE_RANKS:
        if row["name"] == name:
            _three_ranks(row)


def _three_ranks(row: Row) -> None:
    setting = (row["optimizer"], row["clip"])
    job = (zero_and_reference, row["name"], row["stage"], setting, "ddp", torch.float32)
    got, want = zip(*run_ranks(3, *job, timeout=220, **OPTIONS), strict=True)
    assert_same(got, want, rtol=1e-6)
