"""What becomes of an optimizer's groups, names and parameters where it is saved or loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from zerofx import checkpoint
from zerofx.errors import UnsupportedError


def _stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_optimizers_that_share_parameters_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    both = [_stepped(AdamW(model.parameters())), _stepped(SGD([model.bias], momentum=0.9))]
    with pytest.raises(UnsupportedError, match="several optimizers have") as refusal:
        checkpoint.save(tmp_path / "both", model, both)
    assert refusal.value.offenders == ("bias",) and "of its own" in refusal.value.remedy
    assert not (tmp_path / "both").exists()
