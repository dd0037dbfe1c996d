"""A run that lost a rank goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.faults.resumed import STEPS, train
from tests.ranks import RanksFailed, run_ranks


def test_bitwise(tmp_path: Path) -> None:
    wanted = run_ranks(4, train, str(tmp_path / "whole"))
    with pytest.raises(RanksFailed, match="rank 1 is gone"):
        run_ranks(4, train, str(tmp_path / "killed"), 1)
    resumed = run_ranks(4, train, str(tmp_path / "killed"))
    for (losses, params), (all_losses, all_params) in zip(resumed, wanted, strict=True):
        assert len(losses) == 2 * (STEPS - 2)
        assert losses == all_losses[4:]
        for got, want in zip(params, all_params, strict=True):
            assert torch.equal(got, want)
