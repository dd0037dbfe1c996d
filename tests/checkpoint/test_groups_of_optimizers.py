"""What becomes of an optimizer's groups, names and parameters where it is saved or loaded."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from zerofx import checkpoint
from zerofx.checkpoint import snapshot
from zerofx.checkpoint.damage import read_metadata
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


class _Counted(dict[str, Any]):
    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()

    def items(self) -> ItemsView[str, Any]:
        self.passes += 1
        return super().items()


def test_a_load_reads_the_names_once(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    optimizer = AdamW([{"params": [param]} for param in model.parameters()])
    checkpoint.save(tmp_path / "one", model, _stepped(optimizer))
    metadata = read_metadata(tmp_path / "one")
    metadata.state_dict_metadata = names = _Counted(metadata.state_dict_metadata)
    with snapshot.to_fill(model, [optimizer], metadata) as wanted:
        assert len(wanted["optimizer"]["state"]) == len(optimizer.param_groups) == 8
    assert names.passes == 1
