"""Losses of positions that ranks share, beyond what a model of few positions shows."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from zerofx.sequence.losses import whole_loss

_MANY = 70_000
"""Of each rank: more than fp16 can count."""


def _means() -> list[float]:
    """Cross entropy of even chances, with classes as chances, as labels, and with weights."""
    group = dist.group.WORLD
    assert group is not None
    logits = torch.zeros(_MANY, 2, dtype=torch.float16)
    labels = torch.arange(_MANY) % 2
    weight = torch.tensor([2.0, 3.0], dtype=torch.float16)
    return [
        whole_loss(logits, target, its, -100, "mean", 0.0, group.group_name).item()
        for target, its in ((logits + 0.5, None), (labels, None), (labels, weight))
    ]


def test_a_mean_of_many_positions_in_16_bits() -> None:
    for means in run_ranks(2, _means):
        assert means == pytest.approx([math.log(2)] * 3, rel=1e-3)
