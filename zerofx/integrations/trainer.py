"""`Trainer`: transformers' own, whose model, optimizer and checkpoints are sharded."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import ProjectConfiguration, recursively_apply
from torch import nn
from torch.utils.data import DataLoader

import zerofx
from zerofx.config import ZeroConfig
from zerofx.errors import CheckpointError, ConfigError
from zerofx.integrations.accelerator import Accelerator
from zerofx.integrations.adapters import load_adapters, write_adapters
from zerofx.integrations.arguments import file_aside
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.sampling import DataSampler
from zerofx.integrations.recipe import auto_values, refuse_disagreement
from zerofx.integrations.reports import Reports
from zerofx.integrations.rivals import refuse_arguments, told_by
from zerofx.integrations.samples import (
    EpochSampler,
    draw_from,
    refuse_more_epochs,
    sum_over_sequence,
    with_sampler,
)
from zerofx.sequence.marks import is_part

_FOLDER = "zerofx"
_SCHEDULER = "scheduler.pt"
_NOT_YET = 10**9  # steps, of which a schedule is made when they are known

# What a mixin stands on is known where it is mixed in.
_Base: Any = object


class TrainerMixin(_Base):
    """Put before a trainer class, it lets zerofx shard: `class Mine(TrainerMixin, SFTTrainer)`.

    Checkpoints hold what transformers' hold, but for `optimizer.pt`: the optimizer's state, and the
    weights once more, are in the folder `zerofx`, in the format of `torch.distributed.checkpoint`.

    Args:
        zero: stage and options; or what `zerofx.from_deepspeed` returns, whose optimizer, schedule,
            loss scaling and reports are used if its file names them. By default the file that
            `TrainingArguments` of this package names (`--deepspeed`), else stage 3.
        compile_kwargs: for `nn.Module.compile`: `dynamic`, `fullgraph`, `mode`.
        layer: class of the layers that the file's `random_ltd` routes; by default the one that the
            model names.
        make_sampler: called with the training data where the file draws samples; by default the
            recipe's.
        args, kwargs: those of the trainer.

    Raises:
        ConfigError: the arguments ask another library to distribute or compile; names which. Or
            ranks have parts of sequences, and the trainer is to compute the loss.
    """

    def __init__(
        self,
        *args: Any,
        zero: ZeroConfig | Recipe | None = None,
        compile_kwargs: Mapping[str, Any] | None = None,
        layer: type[nn.Module] | None = None,
        make_sampler: Callable[[Any], DataSampler] | None = None,
        **kwargs: Any,
    ) -> None:
        self._zero, self._recipe = told_by(zero)
        self._our_kwargs = {"compile_kwargs": compile_kwargs, "layer": layer}
        self._make_sampler = make_sampler
        self._sampler: EpochSampler | None = None
        self._reports: Reports | None = None
        self._counts_epochs = False
        with file_aside(args, kwargs) as self._file:
            super().__init__(*args, **kwargs)
        if self._cuts_sequences and (self.label_smoother or self.compute_loss_func):
            raise ConfigError(
                "autosp: with label_smoothing_factor or compute_loss_func the trainer computes the "
                "loss itself, from logits of which each rank has a part",
                "let the model compute it from the labels",
            )
        if self._reports is not None:
            self.add_callback(self._reports)

    def create_accelerator_and_postprocess(self) -> None:
        """Put zerofx's accelerator in the place of the one that transformers makes."""
        refuse_arguments(self.args)
        if self._file is not None:  # also where these are not the arguments that were given
            self.args.zero_file = self._file
            if self._recipe is None and self._zero is None:
                self._recipe = _read(self._file, self.args, _NOT_YET)
                self._counts_epochs = self.args.max_steps <= 0
        if self._recipe is not None:
            self.args.save_on_each_node |= self._recipe.node_local  # the trainer's own files, too
        super().create_accelerator_and_postprocess()
        if self._recipe is not None:  # `accelerator_config` may have changed the arguments
            refuse_disagreement(self._recipe, self.args)
        _refuse_lost_best(self.args, self._recipe)
        self.accelerator = _TrainersAccelerator(
            self._zero if self._recipe is None else self._recipe,
            project_config=ProjectConfiguration(save_on_each_node=self.args.save_on_each_node),
            **self._our_kwargs,
            **self._accelerator_arguments,
        )
        if self._recipe is not None:
            idle = self._recipe.make_scaler(self.args.device.type)
            scaler = self.accelerator.scaler if self._recipe.scaling.enabled else idle
            self._reports = Reports(self._recipe, scaler)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics,
            use_gather_object=self.args.eval_use_gather_object,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """As transformers does, or with the samples that the file draws."""
        loader: Any = super().get_train_dataloader()
        if self._recipe is None or self._recipe.sampling is None:
            return loader
        drawn = draw_from(loader.dataset, self._make_sampler or self._recipe.make_sampler)
        epochs, each = self._recipe.sampling.num_epochs, self._recipe.batch.accumulation
        self._sampler = EpochSampler(drawn, epochs, each, lambda: self.state.global_step)
        refuse_more_epochs(self._sampler, self.args)
        return self.accelerator.prepare(with_sampler(loader, self._sampler))

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = super()._prepare_inputs(inputs)
        main: Any = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if self._cuts_sequences and main is not None:
            zerofx.mark_sequence(main)
        return inputs

    @property
    def _cuts_sequences(self) -> bool:
        return self._recipe is not None and self._recipe.chosen.sequence_parallel > 1

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of a micro-batch; a file of DeepSpeed may have its time taken."""
        if self._recipe is None or self._reports is None:
            return super().training_step(*args, **kwargs)
        with self._reports.measure("forward and backward"):
            loss = super().training_step(*args, **kwargs)
        # Those of a sequence add up, and the mean over ranks is shown.
        loss = loss * self._recipe.num_shares
        self._reports.heard(loss)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As transformers does; where ranks generate, each goes on until the last one is done."""
        return super().evaluate(*args, **{**_together(self), **kwargs})

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does; see `evaluate`."""
        return super().predict(*args, **{**_together(self), **kwargs})

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As transformers does; the time that preparing the model took is of this one alone."""
        found = super().evaluation_loop(*args, **kwargs)
        self.__dict__.pop("model_preparation_time", None)  # later ones would subtract it, too
        return found

    def prediction_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """As transformers does, with whole sequences; losses of ranks that share one are added."""
        called: Any = functools.partial(_whole_outputs, model) if self._cuts_sequences else model
        loss, logits, labels = super().prediction_step(called, *args, **kwargs)
        if loss is not None and self._recipe is not None and self._recipe.num_shares > 1:
            loss = sum_over_sequence(self.accelerator, loss, self._recipe.batch)
        return loss, logits, labels

    def get_total_train_batch_size(self, args: transformers.TrainingArguments) -> int:
        """Samples of a step; those that ranks share count once."""
        size = super().get_total_train_batch_size(args)
        return size if self._recipe is None else size // self._recipe.batch.alike

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As transformers does, or as the recipe says; biases and norms do not decay."""
        if self._recipe is None or self._recipe.optimizer is None or self.optimizer is not None:
            return super().create_optimizer(model)
        wanted = model or self.model
        decaying = set(self.get_decay_parameter_names(wanted))
        named = [(name, param) for name, param in wanted.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in named if name in decaying]},
            {
                "params": [param for name, param in named if name not in decaying],
                "weight_decay": 0.0,
            },
        ]
        self.optimizer = self._recipe.make_optimizer(groups)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """As transformers does, or as the recipe says."""
        if self._recipe is None or self._recipe.shape is None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self._counts_epochs and self._reports is not None:
            found = _read(self._file, self.args, num_training_steps)
            self._recipe = dataclasses.replace(self._recipe, shape=found.shape, rows=found.rows)
            self._reports.recipe = self._recipe
        drawn = None if self._sampler is None else self._sampler.drawn
        schedule: Any = self._recipe.make_scheduler(optimizer or self.optimizer, drawn)
        self.lr_scheduler, self._created_lr_scheduler = schedule, True
        return schedule

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write full weights, or adapters, as `from_pretrained` reads them; every rank calls it."""
        folder = output_dir or self.args.output_dir
        if not write_adapters(self.model, lambda state: self._save(folder, state_dict=state)):
            state = self.accelerator.get_state_dict(self.model)
            if self.is_world_process_zero():
                self._save(folder, state_dict=state)
        if self.args.should_save:  # also on the disk of another node, where no full weights are
            os.makedirs(folder, exist_ok=True)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**kwargs)
        return self._accelerator_arguments

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.accelerator.save_shards(Path(output_dir) / _FOLDER, self.model, _inner(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        shared = not self.args.save_on_each_node  # else loading says what which node lacks
        if shared and not (folder / _FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} holds no sharded optimizer state (folder {_FOLDER})",
                "resume from a checkpoint that this trainer wrote without save_only_model; "
                "from_pretrained reads the weights of any",
            )
        self.accelerator.load_shards(folder / _FOLDER, self.model, _inner(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(folder / _SCHEDULER, weights_only=True))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Nothing yet: weights come with the optimizer's state, when the model is sharded."""

    def _load_best_model(self) -> None:
        best = Path(str(self.state.best_model_checkpoint))
        if (best / _FOLDER).is_dir():
            self.accelerator.load_shards(best / _FOLDER, self.model)
        elif not load_adapters(self.model, best):
            zerofx.load_safetensors(self.model, best)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` over zerofx: `Trainer(model, args, …, zero=ZeroConfig(stage=3))`."""


def _read(file: Any, args: transformers.TrainingArguments, num_training_steps: int) -> Recipe:
    return zerofx.from_deepspeed(file, auto=auto_values(args, num_training_steps))


class _TrainersAccelerator(Accelerator):
    _counts = False


def _together(trainer: TrainerMixin) -> dict[str, bool]:
    """What `generate` is told where each forward needs all ranks, as for DeepSpeed and FSDP."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    generates = isinstance(trainer, transformers.Seq2SeqTrainer)
    return {"synced_gpus": True} if several and generates else {}


def _inner(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer without Accelerate's wrapper."""
    return optimizer.optimizer


def _whole_outputs(model: nn.Module, **inputs: Any) -> Any:
    return recursively_apply(zerofx.gather_sequence, model(**inputs), test_type=is_part)


def _refuse_lost_best(args: transformers.TrainingArguments, recipe: Recipe | None) -> None:
    parts = recipe is not None and recipe.tensor_parallel is not None
    if args.load_best_model_at_end and args.save_only_model and (parts or args.save_on_each_node):
        raise ConfigError(
            "save_only_model writes full weights in one place, and load_best_model_at_end needs "
            "those of each part of the model, on each node",
            "leave one of them out",
        )
