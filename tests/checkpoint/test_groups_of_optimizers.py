"""What becomes of an optimizer's groups, names and parameters where it is saved or loaded."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import zerofx
from tests.checkpoint.runs import sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.checkpoint import snapshot
from zerofx.checkpoint.damage import read_metadata
from zerofx.errors import CheckpointError, UnsupportedError


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


@pytest.mark.parametrize("empty", [[0], [1], [0, 2], [1, 2]])
def test_groups_may_be_empty(tmp_path: Path, empty: list[int]) -> None:
    model = nn.Linear(3, 2)

    def fresh(rate: float) -> AdamW:
        groups = [model.parameters() if at not in empty else [] for at in range(len(empty) + 1)]
        return AdamW([{"params": each, "lr": rate + at} for at, each in enumerate(groups)])

    saved = _stepped(fresh(0.5))
    checkpoint.save(tmp_path / "one", model, saved)
    for loaded in (fresh(0.0), _stepped(fresh(0.0))):
        checkpoint.load(tmp_path / "one", model, loaded)
        torch.testing.assert_close(loaded.state_dict(), saved.state_dict(), rtol=0, atol=0)
        _stepped(loaded)


def test_names_stay_in_the_order_of_their_parameters(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    named = list(model.named_parameters())
    checkpoint.save(tmp_path / "one", model, _stepped(AdamW(named)))
    loaded = AdamW(named[::-1])
    checkpoint.load(tmp_path / "one", model, loaded)
    assert loaded.param_groups[0]["param_names"] == ["bias", "weight"]
    unnamed = AdamW(model.parameters())
    checkpoint.load(tmp_path / "one", model, unnamed)
    assert "param_names" not in unnamed.param_groups[0]


class _Decaying(Optimizer):
    """Its decay knows no learning rate."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["sum"] = param.grad.clone()
                    param.mul_(0.5).add_(param.grad, alpha=-group["lr"])


def test_a_save_before_the_first_step_changes_no_parameters(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = _Decaying(model.parameters())
    before = model.weight.detach().clone()
    checkpoint.save(tmp_path / "one", model, optimizer)
    assert torch.equal(model.weight, before) and model.weight.grad is None
    assert not optimizer.state


def test_a_refused_load_changes_no_parameters(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    checkpoint.save(tmp_path / "other", saved, _stepped(_Decaying(saved.parameters())))
    run_ranks(2, _refused_and_loaded, tmp_path)


def _refused_and_loaded(folder: Path) -> None:
    for stage in (None, 1, 3):
        model: Any = nn.Linear(3, 2)
        if stage is not None:
            zerofx.shard(model, sharded_by(stage))
        optimizer = _Decaying(model.parameters())
        with torch.no_grad():
            before = model(torch.ones(1, 3)).clone()
        with refused("does not fit", kind=CheckpointError):
            checkpoint.load(folder / "other", model, optimizer)
        with torch.no_grad():
            assert torch.equal(model(torch.ones(1, 3)), before)
        assert not optimizer.state


class _Wide(Optimizer):
    """Keeps what it sums up in fp32, whatever parameters are, and codes."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["sum"] = torch.zeros_like(param, dtype=torch.float32)
                        state["codes"] = {"low": torch.zeros_like(param, dtype=torch.uint8)}
                        state["several"] = [torch.zeros_like(param, dtype=torch.float64)]
                    state["sum"].add_(param.grad.float() / 3)
                    state["codes"]["low"].add_(1)
                    state["several"][0].add_(param.grad.double() / 3)


def _widened(folder: Path, *stages: int | None) -> None:
    for stage in stages:
        model: Any = nn.Linear(3, 8, dtype=torch.bfloat16)
        if stage is not None:
            zerofx.shard(model, sharded_by(stage))
        saved = _stepped(_Wide(model.parameters()))
        checkpoint.save(folder / str(stage), model, saved)
        loaded = _Wide(model.parameters())
        checkpoint.load(folder / str(stage), model, loaded)
        for param in model.parameters():
            got, want = loaded.state[param], saved.state[param]
            assert got["sum"].dtype is torch.float32
            torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_state_keeps_its_dtypes(tmp_path: Path) -> None:
    run_ranks(2, _widened, tmp_path, 2, 3)
    _widened(tmp_path, None)
