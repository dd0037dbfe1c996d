"""Several optimizers that share a model are saved and loaded together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

import zerofx
from tests.checkpoint.runs import OPTIONS, bitwise, full
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError


class _Run:
    """Muon of whole matrices and AdamW of vectors, as docs/owners.md has it."""

    def __init__(self, stage: int, seed: int = 0) -> None:
        torch._dynamo.reset()
        self.model = make("mlp", seed=seed)
        self.step: Any = torch.compile(self.model, backend=f"zero{stage}", options=OPTIONS)
        matrices = [param for param in self.model.parameters() if param.ndim == 2]
        vectors = [param for param in self.model.parameters() if param.ndim == 1]
        muon = zerofx.OwnerOptimizer(matrices, Muon, lr=0.02)
        self.optimizers: list[Optimizer] = [muon, AdamW(vectors, lr=1e-2)]

    def train(self, *steps: int) -> list[float]:
        losses: list[float] = []
        for number in steps:
            loss = self.step(*batch("mlp", dist.get_rank(), number))
            loss.backward()
            for each in self.optimizers:
                each.step()
                each.zero_grad()
            losses.append(loss.item())
        return losses

    def values(self) -> dict[str, torch.Tensor]:
        return {name: full(value) for name, value in self.model.state_dict().items()}


def _resumed(folder: Path) -> None:
    run = _Run(3)
    checkpoint.save(folder / "new", run.model, run.optimizers)
    run.train(0, 1)
    run.optimizers[1].param_groups[0]["lr"] = 5e-3
    checkpoint.save(folder / "a", run.model, run.optimizers, "notes")
    at_save, losses = run.values(), run.train(2, 3)
    for stage in (3, 1):
        again = _Run(stage, seed=1)
        assert checkpoint.load(folder / "a", again.model, again.optimizers) == "notes"
        bitwise(again.values(), at_save)
        assert again.optimizers[1].param_groups[0]["lr"] == 5e-3
        assert again.train(2, 3) == losses
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
