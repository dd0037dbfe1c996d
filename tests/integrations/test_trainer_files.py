"""What a Trainer reads: adapters of the best checkpoint, the file that `--deepspeed` names."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import zerofx
from tests.integrations.data_files import DRAWN, PACKED
from tests.integrations.examples import BASE, nested
from tests.integrations.loops import config_of, fresh_state
from tests.integrations.test_trainer import Config, Counting, Texts, tiny, trainer_of
from tests.ranks import run_ranks
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import SAMPLING

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def keeps_best_adapters(folder: str) -> None:
    """Without the optimizer's state a checkpoint holds adapters alone."""
    from zerofx.integrations.adapters import write_adapters

    peft: Any = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["hidden"]))
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_only_model": True}
    absurd = {"learning_rate": 30.0, "warmup_steps": 0, "max_steps": 3}
    trainer = trainer_of(3, folder, model, load_best_model_at_end=True, **often, **absurd)
    trainer.train()
    best = peft.load_peft_weights(trainer.state.best_model_checkpoint, device="cpu")
    found: dict[str, torch.Tensor] = {}
    assert write_adapters(trainer.model, found.update)
    if dist.get_rank() == 0:
        for name, value in best.items():
            assert torch.equal(found[name.replace(".weight", ".default.weight")], value), name


def test_the_best_adapters_are_loaded_at_the_end(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    run_ranks(2, keeps_best_adapters, str(tmp_path), timeout=200)


_FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 2, "ignore_unused_parameters": False},
    "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
    "dump_state": True,
    "csv_monitor": {"enabled": True, "job_name": "run"},
}


class Speaks(Counting):
    """Says how it was asked to generate."""

    def generate(self, input_ids: torch.Tensor, labels: Any, **how: Any) -> torch.Tensor:
        self.how = how
        return input_ids


def generates(folder: str) -> None:
    """Answers have different lengths, and each forward needs all ranks."""
    from zerofx.integrations import TrainerMixin

    class Mine(TrainerMixin, transformers.Seq2SeqTrainer):
        pass

    fresh_state()
    model = Speaks(Config(tie_word_embeddings=True))
    model.generation_config = transformers.GenerationConfig(max_length=2, pad_token_id=0)
    how = {"predict_with_generate": True, "use_cpu": True, "report_to": "none"}
    args = transformers.Seq2SeqTrainingArguments(folder, disable_tqdm=True, **how)
    kwargs: Any = {"eval_dataset": Texts(4), "compute_metrics": lambda found: {}}
    trainer: Any = Mine(model, args, zero=config_of(3), **kwargs)
    trainer.evaluate(num_beams=2)
    assert model.how == {"num_beams": 2, "synced_gpus": True}
    trainer.predict(Texts(4), synced_gpus=False)
    assert model.how == {"synced_gpus": False}


def test_ranks_generate_together(tmp_path: Path) -> None:
    run_ranks(2, generates, str(tmp_path), timeout=200)


def reads_the_flag(folder: str) -> str:
    from zerofx.integrations import Trainer, TrainingArguments
    from zerofx.sharding.shard import session_of

    fresh_state()
    file = Path(folder) / f"ds_config{dist.get_rank()}.json"
    monitor = {"csv_monitor": {**_FILE["csv_monitor"], "output_path": folder}}
    file.write_text(json.dumps({**_FILE, **monitor}))
    flags = [f"--output_dir={folder}", f"--deepspeed={file}", "--use_cpu", "--max_steps=4"]
    flags += ["--per_device_train_batch_size=2", "--gradient_accumulation_steps=2"]
    parser = transformers.HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        [*flags, "--report_to=none", "--save_steps=2", "--disable_tqdm=1"]
    )
    # A file cannot say it, and segments need no compiler to show what one says.
    eager = functools.partial(zerofx.from_deepspeed, inner="eager")
    with patch("zerofx.from_deepspeed", eager):
        trainer: Any = Trainer(tiny(), args, train_dataset=Texts(20))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        loss = trainer.train().training_loss
    shown = Path(folder) / "run" / "Train_Samples_train_loss.csv"
    told = shown.read_text().split()[1:]
    with contextlib.redirect_stdout(io.StringIO()) as resumed:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    again = shown.read_text().split()[1:]
    assert [int(line.partition(",")[0]) for line in again] == [8, 16, 24, 32, 24, 32]
    assert "step=2," not in resumed.getvalue()
    if dist.get_rank() == 0:
        mean = sum(float(line.partition(",")[2]) for line in told) / 4
        assert mean == pytest.approx(loss, rel=1e-5)
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    assert session_of(trainer.model).config.stage == 2
    return printed.getvalue()


def test_the_flag_of_deepspeed_names_a_file(tmp_path: Path) -> None:
    spoken, silent = run_ranks(2, reads_the_flag, str(tmp_path), timeout=200)
    assert "step=2, skipped=0, lr=[" in spoken and "step=4, skipped=0, lr=[" in spoken
    assert "forward and backward=" in spoken and "option stage: 2" in spoken
    assert "step=" not in silent


def test_arguments_that_are_made_again_know_the_file(tmp_path: Path) -> None:
    """Trainers that others derive make arguments of their own class: trl's do."""
    from zerofx.integrations import TrainerMixin, TrainingArguments

    @dataclasses.dataclass
    class Arguments(transformers.TrainingArguments):
        pass

    class Derived(transformers.Trainer):
        def __init__(self, model: Any, args: Any) -> None:
            super().__init__(model, Arguments(**args.to_dict()))

    class Mine(TrainerMixin, Derived):
        pass

    fresh_state()
    file = tmp_path / "ds_config.json"
    sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    file.write_text(json.dumps({**sizes, "zero_optimization": {"stage": 1}}))
    args = TrainingArguments(str(tmp_path), deepspeed=str(file), use_cpu=True, report_to="none")
    for again in (TrainingArguments(**args.to_dict()), dataclasses.replace(args)):
        assert (again.zero_file, again.deepspeed) == (str(file), None)
    trainer: Any = Mine(tiny(), args)
    assert type(trainer.args) is Arguments and args.zero_file == trainer.args.zero_file == str(file)
    assert trainer._recipe.config.stage == 1
    assert Mine(tiny(), args=trainer.args)._recipe.config.stage == 1


@pytest.mark.parametrize(
    ("kind", "total", "warmup", "wanted"),
    [
        ("WarmupLR", {}, 2, {"warmup_num_steps": 2}),
        ("WarmupLR", {}, 0, {"warmup_num_steps": 1}),
        ("WarmupDecayLR", {"total_num_steps": "auto"}, 0.2, {"total_num_steps": 15}),
        ("WarmupDecayLR", {"total_num_steps": 7}, 0.2, {"warmup_num_steps": 3}),
    ],
)
def test_steps_of_epochs_are_filled_in(
    kind: str, total: dict[str, Any], warmup: float, wanted: dict[str, int], tmp_path: Path
) -> None:
    """A number of steps is known at once, a share of them and their sum when training begins."""
    from zerofx.integrations import Trainer, TrainingArguments, auto_values

    fresh_state()
    params = {"warmup_num_steps": "auto", "warmup_max_lr": "auto", **total}
    file = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": kind, "params": params},
    }
    args = TrainingArguments(
        str(tmp_path), deepspeed=file, warmup_steps=warmup, use_cpu=True, report_to="none"
    )
    trainer: Any = Trainer(tiny(), args, train_dataset=Texts(20))
    trainer.create_optimizer_and_scheduler(15)
    for recipe in (
        trainer._reports.recipe,
        zerofx.from_deepspeed(file, auto=auto_values(args, 15)),
    ):
        assert trainer.lr_scheduler._shape == recipe.shape
        for name, value in wanted.items():
            assert getattr(recipe.shape, name) == value
    if warmup < 1 and warmup:
        with pytest.raises(ConfigError, match="warmup_num_steps"):
            zerofx.from_deepspeed(file, auto=auto_values(args))
    else:
        zerofx.from_deepspeed(file, auto=auto_values(args))


def test_what_a_trainer_does_itself_must_agree(tmp_path: Path) -> None:
    from zerofx.integrations.recipe import refuse_disagreement

    args = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, use_cpu=True
    )
    against = {
        "gradient_clipping": 0.5,
        "dataloader_drop_last": True,
        f"{SAMPLING}.num_workers": 3,
    }
    for key, value in against.items():
        file = nested({"train_micro_batch_size_per_gpu": 2, **DRAWN, key: value})
        with pytest.raises(ConfigError, match=f"{key}: {value} in the file"):
            refuse_disagreement(zerofx.from_deepspeed(file, world_size=2), args)
    packed = zerofx.from_deepspeed(nested({**BASE, **PACKED}), world_size=2)
    with pytest.raises(ConfigError, match="name a scheduler"):
        refuse_disagreement(packed, args)
