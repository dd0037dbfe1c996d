"""Exceptions in the middle of a program: with collectives under way, the next step goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hard.pair import EAGER, Pair, draw
from tests.ranks import run_ranks
from zerofx.sharding.shard import session_of


class Lookup(nn.Module):
    """Adds rows of a table, which a wrong index does not find, between gathers of other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(64, 64), nn.Embedding(100, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, rows: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)) + self.table(rows)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _skips(stage: int) -> None:
    pair = Pair(Lookup(), stage, {**EAGER, "bucket_bytes": 20000, "hang_timeout": 5}, rtol=1e-6)

    def loss(run: Any, number: int) -> Tensor:
        return run(draw(4, 64, seed=number), torch.arange(4) + number)

    for number in range(6):
        if number % 2:
            for run in (pair.run, pair.plain):
                with pytest.raises(IndexError):
                    run(draw(4, 64, seed=number), torch.full((4,), 1000))
            session = session_of(pair.model)
            assert session is not None and session.gathered.used_bytes() == 0
        pair.train(loss, [number])


@pytest.mark.parametrize("stage", [1, 3])
def test_batches_that_all_ranks_skip(stage: int) -> None:
    run_ranks(2, _skips, stage)
