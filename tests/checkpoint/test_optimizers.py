"""Several optimizers that share a model are saved and loaded together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.optim import AdamW, Muon

import zerofx
from tests.checkpoint.runs import Run, bitwise
from tests.models import make
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError


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
    for stage in (3, 1):
        again = _run(stage, seed=1)
        assert checkpoint.load(folder / "a", again.model, again.optimizers) == "notes"
        bitwise(Run.values(again.model), at_save)
        assert again.optimizers[1].param_groups[0]["lr"] == 5e-3
        assert again.train(range(2, 4)) == losses
    checkpoint.load(folder / "new", again.model, again.optimizers)
    assert not any(each.state for each in again.optimizers)


def test_they_go_on_together(tmp_path: Path) -> None:
    run_ranks(2, _resumed, tmp_path)


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
