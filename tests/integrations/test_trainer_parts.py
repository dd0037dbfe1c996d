"""Files of which ranks share a model, a sequence or no disk, under transformers' Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import zerofx
from tests.checkpoint.runs import bitwise
from tests.integrations.examples import nested
from tests.integrations.test_trainer import UNEVEN, Config, Counting, history, trainer_of, values_of
from tests.ranks import run_ranks
from zerofx.errors import ConfigError

pytest.importorskip("accelerate")

_BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization.stage3_param_persistence_threshold": 7,
}
FILES: dict[str, dict[str, Any]] = {
    "parts of a model": {
        **_BASE,
        "zero_optimization.stage": 3,
        "tensor_parallel.autotp_size": 2,
        "tensor_parallel.partition_config.layer_specs": [
            {"patterns": ["hidden"], "gather_output": True}
        ],
    },
    "parts of sequences": {
        **_BASE,
        "zero_optimization.stage": 1,
        "sequence_parallel_size": 2,
    },
    "sequences that zerofx cuts": {
        **_BASE,
        "zero_optimization.stage": 2,
        "sequence_parallel_size": 2,
        "compile.passes": ["autosp"],
    },
}

_BEST = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}


class Halves(Counting):
    """A rank's loss is its share: that of its half of each sequence."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(torch.tanh(self.hidden(self.embed(input_ids))))
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        losses = F.cross_entropy(*flat, reduction="none").view(len(labels), -1)
        own = losses.chunk(2, 1)[dist.get_rank() % 2]
        return {"loss": own.sum() / losses.numel(), "logits": logits}


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    kind = Halves if name == "parts of sequences" else Counting
    return kind(Config(tie_word_embeddings=True))


def figures(trainer: Any) -> list[float]:
    """Losses and norms of steps, then what an evaluation finds."""
    found = trainer.evaluate()
    kept = [found[f"eval_{key}"] for key in ("loss", "accuracy", "rows")]
    return [x for line in history(trainer) for x in line] + kept


def over_ddp(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer = trainer_of(None, folder, model_of(""), max_steps=4, save_strategy="no")
    trainer.train()
    return figures(trainer), values_of(trainer.model)


def by_file(name: str, folder: str) -> list[float]:
    """A run in one go, one that goes on from its second step, and what each of them writes."""
    how: dict[str, Any] = {"max_steps": 4, "save_steps": 2}
    recipe = zerofx.from_deepspeed(nested(FILES[name]), inner="eager")
    whole = trainer_of(None, folder, model_of(name), zero=recipe, **how, **_BEST)
    assert whole.get_total_train_batch_size(whole.args) == 8
    whole.train()
    recipe = zerofx.from_deepspeed(nested(FILES[name]), inner="eager")
    part = trainer_of(None, f"{folder}-again", model_of(name), zero=recipe, **how)
    part.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert history(part) == history(whole)
    bitwise(values_of(part.model), values_of(whole.model))
    return figures(whole)


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_ranks(2, over_ddp, str(tmp_path_factory.mktemp("ddp")), timeout=200)[0]


@pytest.mark.parametrize("name", FILES)
def test_ranks_that_share_samples_train_as_one(name: str, wanted: Any, tmp_path: Path) -> None:
    """Losses, norms, metrics and weights are those of half the ranks, over DDP."""
    for found in run_ranks(4, by_file, name, str(tmp_path / "run"), timeout=200):
        assert found == pytest.approx(wanted[0], rel=1e-4)
        assert found[-1] == UNEVEN
    saved = Counting.from_pretrained(tmp_path / "run" / "checkpoint-4").state_dict()
    for key, want in wanted[1].items():
        torch.testing.assert_close(saved[key], want, rtol=1e-4, atol=1e-5)


def on_two_nodes(folder: str) -> None:
    """Each rank is a node, which sees its own folder alone."""
    here = f"{folder}/node{dist.get_rank()}"
    file = {**_BASE, "zero_optimization.stage": 2, "checkpoint.use_node_local_storage": True}
    recipe = zerofx.from_deepspeed(nested(file), inner="eager")
    how: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "zero": recipe}
    with patch.dict(os.environ, LOCAL_RANK="0"):
        whole = trainer_of(None, here, model_of(""), **how)
        whole.train()
        part = trainer_of(None, f"{here}/again", model_of(""), **how)
    part.train(resume_from_checkpoint=f"{here}/checkpoint-2")
    assert history(part) == history(whole)
    names = {path.name for path in Path(here, "checkpoint-4").iterdir()}
    assert {"scheduler.pt", "trainer_state.json", "zerofx"} <= names
    assert ("model.safetensors" in names) == (dist.get_rank() == 0)
    with pytest.raises(ConfigError, match="save_only_model"):
        trainer_of(None, here, **how, save_only_model=True, **_BEST)


def test_each_node_has_its_disk(tmp_path: Path) -> None:
    run_ranks(2, on_two_nodes, str(tmp_path), timeout=200)


def smooths_labels(folder: str) -> None:
    recipe = zerofx.from_deepspeed(nested(FILES["sequences that zerofx cuts"]), inner="eager")
    with pytest.raises(ConfigError, match="loss itself, from logits of which each rank has a part"):
        trainer_of(None, folder, model_of(""), zero=recipe, label_smoothing_factor=0.1)


def test_losses_of_cut_sequences_are_the_models(tmp_path: Path) -> None:
    run_ranks(2, smooths_labels, str(tmp_path), timeout=200)
