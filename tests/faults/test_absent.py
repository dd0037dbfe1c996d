"""A rank that does not come to the sharding of a model: the others name it."""

from __future__ import annotations

import datetime
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contract.loops import FAST, data, net
from tests.logs import heard
from tests.ranks import RanksFailed, run_ranks
from zerofx.torch_private import default_store

OPTIONS = {**FAST, "hang_timeout": 0.5}


def _shard(backend: str) -> Any:
    run = torch.compile(net(), backend=backend, options=OPTIONS)
    run(*data(0)).backward()


def _late(backend: str) -> list[str]:
    if dist.get_rank() == 1:
        time.sleep(3)
    with heard("zerofx") as said:
        _shard(backend)
    return said


@pytest.mark.parametrize("backend", ["zero3", "zero"])
def test_a_rank_that_comes_late_is_named_once(backend: str) -> None:
    """In time the model trains."""
    waiting, late = run_ranks(2, _late, backend)
    (said,) = waiting
    assert said.startswith("rank 1 has not come to") and "of ranks 0, 1" in said and not late


def _gone() -> None:
    store: Any = default_store()
    store.set_timeout(datetime.timedelta(seconds=2))
    if dist.get_rank() == 1:
        os._exit(1)
    _shard("zero3")


def test_a_rank_that_ended_before_is_named() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(3, _gone, timeout=60)
    for rank in (0, 2):
        failure = failed.value.failures[rank]
        assert failure.kind == "RankGoneError"
        assert "rank 1 did not come to the sharding" in failure.message and "2 s" in failure.message
