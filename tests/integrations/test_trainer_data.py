"""Files that draw samples and route tokens, under transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import zerofx
from tests.checkpoint.runs import bitwise
from tests.integrations.data_files import PACKED, ROUTED, metric, write_index
from tests.integrations.examples import nested
from tests.integrations.loops import fresh_state
from tests.integrations.test_trainer import Config, Counting, Texts, history, trainer_of, values_of
from tests.ranks import run_ranks
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import BATCHING, RANDOM_LTD, SAMPLING
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.recipe import layer_of
from zerofx.integrations.samples import draw_from

pytest.importorskip("accelerate")

_ROWS, _STEPS = 20, 4
_BASE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization.stage": 2,
}


class Block(nn.Module):
    """A layer that adds to what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Deep(Counting):
    """Names its layers, as models of transformers do."""

    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        torch.manual_seed(0)
        super().__init__(config)
        self.hidden = nn.Sequential(Block(), Block())


class Noting(Texts):
    """Remembers which rows were asked for."""

    def __init__(self) -> None:
        super().__init__(_ROWS)
        self.asked: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.asked.append(index)
        return super().__getitem__(index)


def _recipe(folder: Path, **keys: Any) -> Recipe:
    flat = {
        **_BASE,
        **ROUTED,
        f"{RANDOM_LTD}.total_layer_num": 2,
        # Of two sizes, since Dynamo traces for each of the first ones.
        f"{RANDOM_LTD}.random_ltd_schedule.min_value": 5,
        f"{RANDOM_LTD}.random_ltd_schedule.max_value": 10,
        f"{RANDOM_LTD}.random_ltd_schedule.schedule_config.require_steps": 2,
        f"{RANDOM_LTD}.random_ltd_schedule.schedule_config.seq_per_step": 5,
        **metric("ease", **write_index(folder, "ease", [1 + i % 9 for i in range(_ROWS)])),
        f"{SAMPLING}.num_epochs": 3,
        **keys,
    }
    return zerofx.from_deepspeed(nested(flat), inner="eager", min_shard_numel=8)


def _trainer(folder: str, recipe: Recipe, **changes: Any) -> Any:
    how: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "save_steps": 3, **changes}
    trainer = trainer_of(None, folder, Deep(Config(tie_word_embeddings=True)), recipe, **how)
    trainer.train_dataset = Noting()
    return trainer


def drawn(folder: str) -> None:
    """Two epochs of two steps in one go, and a run that goes on within the second."""
    own = Path(folder, f"index{dist.get_rank()}")
    own.mkdir()
    whole = _trainer(f"{folder}/run", _recipe(own))
    whole.train()
    assert whole.state.global_step == _STEPS and whole.state.epoch == 2
    wanted = [row for micro in _recipe(own).make_sampler(_ROWS) for row in micro]
    assert whole.train_dataset.asked == wanted[: _STEPS * 4]
    # Steps of 5, 5, 10 and 10 tokens in both layers, eight rows each.
    assert whole.accelerator.router.state_dict() == {
        "steps": _STEPS,
        "layer_tokens": 8 * 2 * (5 + 5 + 10 + 10),
    }
    part = _trainer(f"{folder}/again", _recipe(own))
    part.train(resume_from_checkpoint=f"{folder}/run/checkpoint-3")
    assert part.train_dataset.asked[-4:] == wanted[12:16]
    assert history(part) == history(whole)
    bitwise(values_of(part.model), values_of(whole.model))
    with pytest.raises(ConfigError, match=r"num_epochs is 3, and the arguments ask for 3\.5"):
        _trainer(folder, _recipe(own), max_steps=7).train()


def test_samples_and_tokens_are_those_of_the_file(tmp_path: Path) -> None:
    run_ranks(2, drawn, str(tmp_path), timeout=200)


def packed(folder: str) -> list[float]:
    """Rates of a schedule that follow the samples of each step."""
    flat = {
        **_BASE,
        **PACKED,
        f"{BATCHING}.max_tokens": 30,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer.type": "SGD",
        "optimizer.params.lr": 0.5,
        "scheduler.type": "WarmupLR",
        "scheduler.params.warmup_min_lr": 0.5,
        "scheduler.params.warmup_max_lr": 0.5,
    }
    recipe = zerofx.from_deepspeed(nested(flat), inner="eager", min_shard_numel=8)
    fresh_state()
    from zerofx.integrations import Trainer, TrainingArguments

    args = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=2,
        per_device_train_batch_size=1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )

    def sampler(data: Any) -> Any:
        return recipe.make_sampler(data, lengths=[10, 10, 10, 10, 20, 20, 20, 10, 9, 1])

    trainer: Any = Trainer(
        Counting(Config(tie_word_embeddings=True)),
        args,
        train_dataset=Texts(10),
        zero=recipe,
        make_sampler=sampler,
    )
    trainer.train()
    return [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]


def test_rates_follow_the_samples_of_a_step(tmp_path: Path) -> None:
    # Packs of 3 and 2 samples, then of 1 and 2: 5/2 and 3/2 of a batch of two.
    assert run_ranks(2, packed, str(tmp_path), timeout=200) == [[1.25, 0.75]] * 2


def test_layers_and_data_that_do_not_fit() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ConfigError, match="a stream of them"):
        draw_from(Stream(), lambda data: None)  # type: ignore[arg-type]
    model = Deep(Config(tie_word_embeddings=True))
    assert layer_of(model, 2) is Block
    with pytest.raises(ConfigError, match="3 layers, and Deep does not say"):
        layer_of(model, 3)
