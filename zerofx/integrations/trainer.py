"""`Trainer`: transformers' own, whose model, optimizer and checkpoints are sharded."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

import zerofx
from zerofx import checkpoint
from zerofx.config import ZeroConfig
from zerofx.errors import CheckpointError, ConfigError
from zerofx.integrations.accelerator import Accelerator
from zerofx.integrations.adapters import adapter_state_dict

_FOLDER = "zerofx"
_SCHEDULER = "scheduler.pt"

# A mixin, for the trainers that others derive from transformers'.
_Base = transformers.Trainer if TYPE_CHECKING else object


class TrainerMixin(_Base):
    """Put before a trainer class, it lets zerofx shard: `class Mine(TrainerMixin, SFTTrainer)`.

    Checkpoints hold what transformers' hold, but for `optimizer.pt`: the optimizer's state, and the
    weights once more, are in the folder `zerofx`, in the format of `torch.distributed.checkpoint`.

    Args:
        zero: stage and options; stage 3 by default.
        compile_kwargs: for `nn.Module.compile`: `dynamic`, `fullgraph`, `mode`.
        args, kwargs: those of the trainer.

    Raises:
        ConfigError: the arguments ask another library to distribute or compile; names which.
    """

    def __init__(
        self,
        *args: Any,
        zero: ZeroConfig | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._zero = zero
        self._compile_kwargs = compile_kwargs
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Put zerofx's accelerator in the place of the one that transformers makes."""
        _refuse_rivals(self.args)
        super().create_accelerator_and_postprocess()
        arguments = self._accelerator_arguments
        self.accelerator = Accelerator(self._zero, compile_kwargs=self._compile_kwargs, **arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write full weights, or adapters, as `from_pretrained` reads them; every rank calls it."""
        state = adapter_state_dict(self.model)
        if state is None:
            state = checkpoint.full_state_dict(self.model)
        if self.args.should_save:
            self._save(output_dir or self.args.output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return self._accelerator_arguments

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer: Any = self.optimizer
        checkpoint.save(Path(output_dir) / _FOLDER, self.model, optimizer.optimizer)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint_folder: str | None) -> None:
        if checkpoint_folder is None:
            return
        folder = Path(checkpoint_folder)
        if not (folder / _FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} holds no sharded optimizer state (folder {_FOLDER})",
                "resume from a checkpoint that this trainer wrote without save_only_model; "
                "from_pretrained reads the weights of any",
            )
        optimizer: Any = self.optimizer
        checkpoint.load(folder / _FOLDER, self.model, optimizer.optimizer)
        self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Nothing yet: weights come with the optimizer's state, when the model is sharded."""

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (best / _FOLDER).is_dir():
            checkpoint.load(best / _FOLDER, self.model)
        else:
            zerofx.load_safetensors(self.model, best)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` over zerofx: `Trainer(model, args, …, zero=ZeroConfig(stage=3))`."""


def _refuse_rivals(args: transformers.TrainingArguments) -> None:
    rivals = [
        (args.deepspeed, "deepspeed", "give the file to zerofx: Trainer(zero=…)"),
        (args.fsdp, "fsdp", "leave it out"),
        (args.torch_compile, "torch_compile", "leave it out: zerofx compiles the model"),
        (args.n_gpu > 1, f"n_gpu={args.n_gpu}", "start one process per GPU with torchrun"),
    ]
    for there, name, remedy in rivals:
        if there:
            raise ConfigError(
                f"the training argument {name} contradicts zerofx.integrations.Trainer, which "
                "distributes and compiles the model itself",
                remedy,
            )
