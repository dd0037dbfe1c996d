"""Hybrid sharding: split inside a group, repeat across groups (a 2-D mesh)."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.hard.pair import EAGER, Pair
from tests.hard.wire import watched
from tests.models import batch, make
from tests.ranks import run_ranks


def _options(how: str) -> dict[str, Any]:
    if how == "replicate":
        return {**EAGER, "replicate": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {**EAGER, "mesh": mesh}


def _hybrid(stage: int, how: str) -> tuple[int, int, int, int]:
    pair = Pair(make("gpt"), stage, _options(how), rtol=1e-6)

    def loss(run: Any, number: int) -> Any:
        return run(*batch("gpt", dist.get_rank(), number))

    pair.train(loss, 3)
    value = loss(pair.run, 9)
    with watched() as wire:
        value.backward()
    sent = sum(num_bytes for call, _, num_bytes in wire.calls if call == "isend")
    repeated = sum(num_bytes for call, _, num_bytes in wire.calls if call == "all_reduce")
    params = list(pair.model.parameters())
    whole = sum(param.nbytes for param in params)
    resident = sum(param._local_tensor.nbytes for param in params)  # pyright: ignore
    return sent, repeated, whole, resident


@pytest.mark.parametrize("how", ["replicate", "mesh"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_ranks_in_two_groups(stage: int, how: str) -> None:
    by_rank = run_ranks(4, _hybrid, stage, how, timeout=220)
    for sent, repeated, whole, resident in by_rank:
        # Shards are halves; all-reduces carry shards, messages stay inside a group of two.
        assert 0.45 * whole < resident < 0.55 * whole
        assert repeated == resident
        gathers = whole if stage == 3 else 0
        assert sent < (whole + gathers) * 0.55
