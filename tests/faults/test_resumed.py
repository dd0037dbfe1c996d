"""A run that lost a rank goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.resumed import STEPS, train
from tests.ranks import RanksFailed, run_ranks


@pytest.mark.parametrize("num_ranks, stage", [(2, 1), (4, 3)])
def test_bitwise(tmp_path: Path, num_ranks: int, stage: int) -> None:
    wanted = run_ranks(num_ranks, train, str(tmp_path / "whole"), stage)
    with pytest.raises(RanksFailed, match="rank 1 is gone"):
        run_ranks(num_ranks, train, str(tmp_path / "killed"), stage, 1)
    resumed = run_ranks(num_ranks, train, str(tmp_path / "killed"), stage)
    for (losses, params), (all_losses, all_params) in zip(resumed, wanted, strict=True):
        assert len(losses) == 2 * (STEPS - 2)
        assert losses == all_losses[4:]
        for got, want in zip(params, all_params, strict=True):
            assert torch.equal(got, want)
