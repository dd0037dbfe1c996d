"""What a Trainer reads: adapters of the best checkpoint, the file that `--deepspeed` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integrations.loops import fresh_state
from tests.integrations.test_trainer import Texts, tiny, trainer_of
from tests.ranks import run_ranks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def keeps_best_adapters(folder: str) -> None:
    """Without the optimizer's state a checkpoint holds adapters alone."""
    from zerofx.integrations.adapters import adapter_state_dict

    peft: Any = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=2, target_modules=["hidden"]))
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "save_only_model": True}
    absurd = {"learning_rate": 30.0, "warmup_steps": 0, "max_steps": 3}
    trainer = trainer_of(3, folder, model, load_best_model_at_end=True, **often, **absurd)
    trainer.train()
    best = peft.load_peft_weights(trainer.state.best_model_checkpoint, device="cpu")
    found = adapter_state_dict(trainer.model)
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
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
}


def reads_the_flag(folder: str) -> None:
    from zerofx.integrations import Trainer, TrainingArguments
    from zerofx.sharding.shard import session_of

    fresh_state()
    file = Path(folder) / f"ds_config{dist.get_rank()}.json"
    file.write_text(json.dumps(_FILE))
    flags = [f"--output_dir={folder}", f"--deepspeed={file}", "--use_cpu", "--max_steps=1"]
    flags += ["--per_device_train_batch_size=2", "--gradient_accumulation_steps=2"]
    parser = transformers.HfArgumentParser(TrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(
        [*flags, "--report_to=none", "--save_strategy=no", "--disable_tqdm=1"]
    )
    trainer: Any = Trainer(tiny(), args, train_dataset=Texts(20))
    trainer.train()
    assert type(trainer.optimizer.optimizer) is torch.optim.SGD
    assert session_of(trainer.model).config.stage == 2


def test_the_flag_of_deepspeed_names_a_file(tmp_path: Path) -> None:
    run_ranks(2, reads_the_flag, str(tmp_path), timeout=200)
