"""Option `detect_anomaly`: a gradient that is not finite stops all ranks, by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.hard.pair import EAGER, full
from tests.ranks import run_ranks
from zerofx.errors import NonFiniteGradientError
from zerofx.sharding.shard import session_of


def _overflows(stage: int) -> tuple[str, ...]:
    """Rank 1's second batch has an infinite loss, through one row of the last layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3, bias=False))
    run = torch.compile(model, backend=f"zero{stage}", options={**EAGER, "detect_anomaly": True})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    scale = torch.ones(3)
    scale[2] = float("inf") if dist.get_rank() == 1 else 1.0
    (run(torch.ones(2, 4)) * scale).sum().backward()
    before = [full(param) for param in model.parameters()]
    with pytest.raises(NonFiniteGradientError) as caught:
        optimizer.step()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(full(param), value)
    session = session_of(model)
    assert session is not None and "finiteness" in session.journal.last()
    return caught.value.offenders


@pytest.mark.parametrize("stage", [1, 3])
def test_all_ranks_stop_and_name_the_parameters(stage: int) -> None:
    for offenders in run_ranks(2, _overflows, stage):
        assert "1.weight" in offenders
