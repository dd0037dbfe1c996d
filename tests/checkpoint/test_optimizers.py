"""Several optimizers of a model, one of several models, and no trace of a step in either."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import zerofx
from tests.checkpoint.runs import Run, bitwise, sharded_by
from tests.contract.loops import refused
from tests.models import make
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError, UnsupportedError


def _run(stage: int, seed: int = 0) -> Run:
    """With Muon of whole matrices and AdamW of vectors, as docs/owners.md has it."""
    run = Run(stage, build=lambda: make("mlp", seed=seed))
    matrices = [param for param in run.model.parameters() if param.ndim == 2]
    vectors = [param for param in run.model.parameters() if param.ndim == 1]
    muon = zerofx.OwnerOptimizer(matrices, Muon, lr=0.02)
    run.optimizers = [muon, AdamW(vectors, lr=1e-2)]
    return run


def _resumed(folder: Path) -> None:
    run = _run(3)
    checkpoint.save(folder / "new", run.model, run.optimizers)
    run.train(range(2))
    run.optimizers[1].param_groups[0]["lr"] = 5e-3
    checkpoint.save(folder / "a", run.model, run.optimizers, "notes")
    at_save, losses = Run.values(run.model), run.train(range(2, 4))
    for again in (run, _run(1, seed=1)):
        assert checkpoint.load(folder / "a", again.model, again.optimizers) == "notes"
        bitwise(Run.values(again.model), at_save)
        assert again.optimizers[1].param_groups[0]["lr"] == 5e-3
        assert again.train(range(2, 4)) == losses
    checkpoint.load(folder / "new", again.model, again.optimizers)
    assert not any(each.state for each in again.optimizers)


def test_they_go_on_together(tmp_path: Path) -> None:
    run_ranks(2, _resumed, tmp_path)


class _Counting(Optimizer):
    """Counts its steps in the group, in three ways."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0, "times": torch.zeros(()), "seen": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["k"] += 1
            group["times"] += 1
            group["seen"].append(1)
            group["first"] = False
            for param in group["params"]:
                self.state[param].setdefault("sum", torch.zeros_like(param)).add_(param.grad)


def _unnoticed(folder: Path, kind: Any) -> None:
    model = zerofx.shard(make("mlp"), sharded_by(3))
    optimizer = kind(model.parameters(), lr=0.1)
    calls: list[Any] = []
    handles: list[Any] = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("own before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("own after")),
        register_optimizer_step_pre_hook(lambda *_: calls.append("before")),
        register_optimizer_step_post_hook(lambda *_: calls.append("after")),
    ]
    wanted = copy.deepcopy(_settings(optimizer))
    for _ in range(2):
        checkpoint.save(folder / "new", model, optimizer)
        checkpoint.load(folder / "new", model, optimizer)
        assert not optimizer.state and _settings(optimizer) == wanted
    checkpoint.save(folder / "model", model)
    with refused("without an optimizer", kind=CheckpointError):
        checkpoint.load(folder / "model", model, optimizer)
    assert not optimizer.state and _settings(optimizer) == wanted and not calls
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert calls == ["before", "own before", "own after", "after"], "hooks are back"
    checkpoint.save(folder / "stepped", model, optimizer)
    wanted = copy.deepcopy(_settings(optimizer))
    again = kind(model.parameters(), lr=0.2)
    checkpoint.load(folder / "stepped", model, again)
    assert _settings(again) == wanted and again.state.keys() == optimizer.state.keys()
    for handle in handles:
        handle.remove()


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("kind", [_Counting, SGD, AdamW])
def test_no_step_is_noticed(tmp_path: Path, kind: Any) -> None:
    run_ranks(2, _unnoticed, tmp_path, kind)


def _two_models(folder: Path) -> None:
    first, second = (zerofx.shard(make("mlp"), sharded_by(3)) for _ in range(2))
    optimizer = AdamW([*first.parameters(), *second.parameters()])
    for use in (checkpoint.save, checkpoint.async_save):
        with refused("AdamW", "6 tensors", "shape [13, 7]", "ModuleList", kind=UnsupportedError):
            use(folder / "a", first, optimizer)
    both = nn.ModuleList([first, second])
    checkpoint.save(folder / "a", both, optimizer)
    with refused("6 tensors that are no parameters of this Mlp", kind=UnsupportedError):
        checkpoint.load(folder / "a", second, optimizer)
    checkpoint.load(folder / "a", both, optimizer)


def test_parameters_frozen_since_they_trained(tmp_path: Path) -> None:
    """They may train again, and the optimizer remembers what they did."""
    saved, loaded = (make("mlp", seed=seed) for seed in (0, 1))
    trained, again = (AdamW(model.parameters(), lr=1e-2) for model in (saved, loaded))
    never = next(saved.parameters()).requires_grad_(False)
    for param in saved.parameters():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    trained.step()
    for model in (saved, loaded):
        model.requires_grad_(False)
    checkpoint.save(tmp_path, saved, trained)
    checkpoint.load(tmp_path, loaded, again)
    assert not any(param.requires_grad for param in loaded.parameters())
    for old, new in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert (new in again.state) == (old is not never)
        torch.testing.assert_close(again.state.get(new), trained.state.get(old), rtol=0, atol=0)


def test_an_optimizer_of_two_models(tmp_path: Path) -> None:
    run_ranks(2, _two_models, tmp_path)


def test_what_is_no_optimizer_or_model_is_refused(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2)
    for wrong in ({"step": 1}, [{"step": 1}], "notes"):
        with pytest.raises(CheckpointError, match=r"a (dict|str) .* for an optimizer(.|\n)*extra"):
            checkpoint.save(tmp_path / "a", model, wrong)  # pyright: ignore
    values = model.state_dict()
    calls = [
        lambda: checkpoint.save(tmp_path, values),
        lambda: checkpoint.load(tmp_path, values),
        lambda: checkpoint.export_safetensors(values, tmp_path),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="OrderedDict for the model"):
            call()
