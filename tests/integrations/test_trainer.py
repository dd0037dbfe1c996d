"""transformers' Trainer over zerofx, beside the same Trainer over DistributedDataParallel."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx.integrations
from tests.checkpoint.runs import bitwise, full
from tests.integrations.loops import config_of, fresh_state
from tests.ranks import run_ranks
from zerofx.errors import ConfigError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


UNEVEN = 21  # rows that two ranks cannot share evenly


class Config(transformers.PretrainedConfig):
    model_type = "counting"


class Counting(transformers.PreTrainedModel):
    """A language model of one hidden layer, with tied embeddings: it compiles in a moment."""

    config_class = Config
    _tied_weights_keys = {"out.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: Any, dropout: float = 0.0) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(48, 12)
        self.hidden = nn.Linear(12, 12)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(12, 48, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.out

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.out(self.dropout(torch.tanh(self.hidden(self.embed(input_ids)))))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def tiny(dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    return Counting(Config(tie_word_embeddings=True), dropout)


class Texts(torch.utils.data.Dataset):
    """Sequences that count upwards."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(10) * (1 + index % 3) + index) % 48
        return {"input_ids": tokens, "labels": tokens}


def accuracy(found: Any) -> dict[str, float]:
    """What `compute_metrics` sees: predictions of all ranks, padding removed."""
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"accuracy": float(right.mean()), "rows": len(found.predictions)}


def trainer_of(
    stage: int | None, folder: str, model: Any = None, zero: Any = None, **changes: Any
) -> Any:
    """zerofx's Trainer at a stage, or as `zero` says, or transformers' own."""
    from zerofx.integrations import Trainer

    fresh_state()
    settings: dict[str, Any] = {
        "output_dir": folder,
        "use_cpu": True,
        "ddp_backend": "gloo",
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        "save_steps": 3,
        "report_to": "none",
        "seed": 7,
    }
    arguments = transformers.TrainingArguments(**{**settings, **changes})
    kwargs: dict[str, Any] = {
        "train_dataset": Texts(20),
        "eval_dataset": Texts(UNEVEN),
        "compute_metrics": accuracy,
    }
    model = tiny() if model is None else model
    if stage is None and zero is None:
        return transformers.Trainer(model, arguments, **kwargs)
    return Trainer(model, arguments, zero=zero or config_of(stage or 3), **kwargs)


def values_of(model: Any) -> dict[str, Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def history(trainer: Any) -> list[tuple[float, float]]:
    """Losses and norms that the trainer logged."""
    return [
        (line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line
    ]


def trained(stage: int | None, folder: str) -> tuple[Any, ...]:
    """Evaluate, train, evaluate."""
    # transformers' own trains each rank alone after an evaluation: it never wraps the model.
    trainer = trainer_of(stage, folder, save_strategy="no")
    before = trainer.evaluate()["eval_loss"]
    if stage is None:
        trainer = trainer_of(stage, folder, save_strategy="no")
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_runtime"] > 0  # without what the first one took to prepare the model
    keys = ("eval_loss", "eval_accuracy", "eval_rows")
    return before, [after[key] for key in keys], history(trainer), values_of(trainer.model)


def resumed(stage: int, folder: str) -> None:
    """A run in one go, and one that goes on from its third step, bit by bit."""
    whole = trainer_of(stage, folder, tiny(dropout=0.1))
    whole.train()
    state = values_of(whole.model)
    part = trainer_of(stage, folder + "-again", tiny(dropout=0.1))
    part.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert history(part) == history(whole)
    bitwise(values_of(part.model), state)
    dist.barrier()
    fresh = Counting.from_pretrained(f"{folder}/checkpoint-6")
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, state[name]), name
    names = {path.name for path in Path(folder, "checkpoint-6").iterdir()}
    assert {"zerofx", "model.safetensors", "trainer_state.json", "scheduler.pt"} <= names
    assert "optimizer.pt" not in names


def test_trains_as_over_ddp(tmp_path: Path) -> None:
    wanted = run_ranks(2, trained, None, str(tmp_path))
    for stage in (1, 3):
        for found, want in zip(
            run_ranks(2, trained, stage, str(tmp_path), timeout=200), wanted, strict=True
        ):
            assert found[0] == pytest.approx(want[0], rel=1e-5)
            assert found[1] == pytest.approx(want[1], rel=1e-4)
            assert found[1][2] == UNEVEN
            assert [x for row in found[2] for x in row] == pytest.approx(
                [x for row in want[2] for x in row], rel=1e-3
            )
            for name, value in found[3].items():
                torch.testing.assert_close(value, want[3][name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", [1, 3])
def test_resumes_bitwise(stage: int, tmp_path: Path) -> None:
    run_ranks(2, resumed, stage, str(tmp_path / "run"), timeout=200)


def looks_at_the_model(folder: str) -> None:
    """Losses of one's own, and smoothed labels, ask the model for more than its outputs."""
    trainer = trainer_of(3, folder)
    compute, seen = trainer.compute_loss, list[Any]()

    def computed(model: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(model)
        return compute(model, *args, **kwargs)

    trainer.compute_loss = computed
    trainer.evaluate()
    assert seen and all(isinstance(model, Counting) for model in seen)


def test_losses_of_an_evaluation_are_given_the_model(tmp_path: Path) -> None:
    run_ranks(2, looks_at_the_model, str(tmp_path), timeout=200)


def keeps_best(folder: str) -> None:
    """The best weights by evaluation are back at the end: the first ones, as the rate is absurd."""
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    absurd = {"learning_rate": 1e6, "warmup_steps": 0, "max_steps": 3}
    trainer = trainer_of(3, folder, load_best_model_at_end=True, **often, **absurd)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    saved = Counting.from_pretrained(best).state_dict()
    for name, value in values_of(trainer.model).items():
        assert torch.equal(value, saved[name]), name


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    run_ranks(2, keeps_best, str(tmp_path / "run"), timeout=200)


FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SGD", "params": {"lr": 0.5, "weight_decay": 0.1}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0.5, "warmup_max_lr": 0.5, "warmup_num_steps": 2},
    },
}


def follows_a_file(folder: str) -> None:
    asked = zerofx.from_deepspeed(FILE, inner="eager", min_shard_numel=8)
    trainer = trainer_of(2, folder, max_steps=2, save_strategy="no", zero=asked)
    trainer.train()
    groups = trainer.optimizer.optimizer.param_groups
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
        (2, 0.1),
        (1, 0.0),
    ]
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert rates == [0.5, 0.5]
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 2 in the file, 1"):
        trainer_of(2, folder, gradient_accumulation_steps=1, zero=asked)
    auto = zerofx.integrations.auto_values(trainer.args)
    assert auto["gradient_accumulation_steps"] == 2 and auto["optimizer.params.lr"] == 1e-2


def test_a_file_of_deepspeed_gives_optimizer_and_schedule(tmp_path: Path) -> None:
    run_ranks(2, follows_a_file, str(tmp_path), timeout=200)


def scales_losses(folder: str) -> None:
    scaling = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    asked = zerofx.from_deepspeed({**FILE, "fp16": scaling}, inner="eager", min_shard_numel=8)
    arguments = {"max_steps": 3, "save_steps": 2, "zero": asked}
    trainer = trainer_of(2, folder, **arguments)
    trainer.train()
    scaler = trainer.accelerator.scaler
    assert isinstance(scaler, zerofx.GradScaler) and scaler.get_scale() == 2**5
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    assert all(0 < norm < 100 for norm in norms), "of unscaled gradients"
    again = trainer_of(2, folder, **arguments)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    assert again.accelerator.scaler.state_dict() == scaler.state_dict()
    for one, other in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(full(one), full(other))


def test_a_file_of_deepspeed_scales_losses(tmp_path: Path) -> None:
    run_ranks(2, scales_losses, str(tmp_path), timeout=200)


def refuses(folder: str) -> None:
    with pytest.raises(ConfigError, match="torch_compile"):
        trainer_of(3, folder, torch_compile=True)


def test_another_compiler_is_refused(tmp_path: Path) -> None:
    run_ranks(2, refuses, str(tmp_path), timeout=200)


def test_transformers_has_what_the_mixin_overrides() -> None:
    from zerofx.integrations.trainer import TrainerMixin

    ours = [name for name, what in vars(TrainerMixin).items() if inspect.isfunction(what)]
    assert not [name for name in ours if not hasattr(transformers.Trainer, name)]
