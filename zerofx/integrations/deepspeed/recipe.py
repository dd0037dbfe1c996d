"""What a `ds_config.json` asks for, ready to train with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerofx.checkpoint.export import export_safetensors
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.curriculum import Pace
from zerofx.integrations.deepspeed.gradients import check_gradients
from zerofx.integrations.deepspeed.report import StepReport
from zerofx.integrations.deepspeed.routing import (
    TokenRouter,
    check_router,
    route_tokens,
)
from zerofx.integrations.deepspeed.sampling import DataSampler, make_sampler, rate_factors
from zerofx.integrations.deepspeed.schedules import Constant, Schedule
from zerofx.integrations.deepspeed.understood import Understood
from zerofx.integrations.tensor_parallel.export import export_joined
from zerofx.runtime.loss_scale import FixedScaler
from zerofx.runtime.params import params_of


class Recipe(Understood):
    """What `zerofx.from_deepspeed` returns; `print` shows how every key was understood."""

    def cast_model(self, model: nn.Module) -> None:
        """Cast parameters and buffers in place, if the file wants it; before they are sharded."""
        self.casts.apply(model)

    def parallelize(self, model: nn.Module) -> None:
        """Keep this rank's part of a whole model, if ranks share one; before it is sharded.

        Every rank calls it with the whole model; rank 0's values win. Parameters stay the same
        objects.

        Raises:
            ConfigError: the model is sharded, has no plan, or cannot be divided so.
            UnsupportedError: a layer, or the style of a plan, is not known here.
        """
        if self.tensor_parallel is not None:
            self.tensor_parallel.parallelize(model)

    def make_optimizer(self, params: Iterable[Any]) -> Optimizer:
        """Build the optimizer over parameters, or groups of them.

        Raises:
            ConfigError: the file names none.
        """
        if self.optimizer is None:
            raise ConfigError("the file names no optimizer", "build your own, or name one")
        return self.optimizer.build(params)

    def make_sampler(
        self,
        data: Sized | int,
        *,
        place: int | None = None,
        paces: Mapping[str, Pace] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> DataSampler:
        """Build what draws this rank's micro-batches: the `batch_sampler` of your data loader.

        Args:
            data: the data set, or its length.
            place: which of `batch.groups` this rank belongs to; by default, ranks that share
                samples are neighbours.
            paces: for each metric with a custom schedule, the difficulty at a step from 1 on.
            lengths: tokens of each sample, for dynamic batching; by default they are read from
                `metrics_path`.

        Raises:
            ConfigError: the file does not enable `data_sampling`, files that it names are missing
                or damaged, or something does not fit the data set.
        """
        return make_sampler(self.sampling, self.batch, data, place, paces or {}, lengths)

    def route_tokens(
        self, model: nn.Module, layer: type[nn.Module], *, place: int | None = None
    ) -> TokenRouter | None:
        """Let layers see random tokens only, as `random_ltd` says; `None` if it says nothing.

        While they train, these layers are given fewer tokens; the others pass them by.

        Args:
            model: plain or sharded; names and parameters stay as they are.
            layer: the class of its layers, whose first argument and output are hidden states.
            place: as in `make_sampler`: ranks that share samples see the same tokens.

        Raises:
            ConfigError: the model does not have the layers.
        """
        return self.routing and route_tokens(self.routing, self.batch, place, model, layer)

    def make_scheduler(
        self, optimizer: Optimizer, sampler: DataSampler | None = None
    ) -> Schedule | None:
        """Build the schedule; `None` if the file names none.

        Args:
            optimizer: whose rates it sets.
            sampler: whose steps rates follow, if the file scales them by `dynamic_batching`.

        Raises:
            ConfigError: the schedule does not suit the optimizer, or the sampler is missing.
        """
        factors = rate_factors(self.sampling, sampler)
        if self.shape is None and factors is None:
            return None
        return Schedule(optimizer, self.shape or Constant(), self.last_step, factors or (1.0,))

    def make_scaler(self, device: str | None = None) -> FixedScaler:
        """Build the loss scaler; it does nothing in fp32.

        Args:
            device: type of the loss's device; by default `cuda` if there is one, else `cpu`.
        """
        return self.scaling.build(device or _device())

    def autocast(self, device: str | None = None) -> contextlib.AbstractContextManager[Any]:
        """What to run the forward in: autocast if the file enables it, else nothing.

        Args:
            device: as in `make_scaler`.
        """
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(device or _device(), dtype=self.autocast_dtype)

    def make_report(
        self,
        optimizer: Optimizer,
        scaler: FixedScaler,
        write: Callable[[str], None] = print,
        *,
        steps: int = 0,
    ) -> StepReport:
        """Build what prints as the file asks; its monitors open here, on rank 0.

        Args:
            optimizer: whose learning rates are shown.
            scaler: which knows of skipped steps.
            write: where rank 0's lines go.
            steps: taken before, by a run that this one resumes.

        Raises:
            ConfigError: the file is to write where there is no folder.
            MissingPackageError: the package of a monitor is not installed.
        """
        report = StepReport(
            optimizer,
            scaler,
            every=self.steps_per_print,
            timed=self.wall_clock_breakdown,
            weighed=self.memory_breakdown,
            monitors=[(name, dict(params)) for name, params in self.monitors.items()],
            samples=self.batch.train,
            flops=self.flops,
            comms=self.comms,
            accumulation=self.batch.accumulation,
            steps=steps,
            write=write,
        )
        if self.dump_state:
            report.write(str(self))
        return report

    @property
    def num_shares(self) -> int:
        """Ranks whose losses add up to that of a sequence: one, if zerofx cuts it."""
        return self.batch.sharing // self.chosen.sequence_parallel

    @property
    def loss_factor(self) -> int:
        """What losses are multiplied by, so that the mean over ranks is what the file asks for."""
        return self.num_shares * (self.batch.groups if self.sums_gradients else 1)

    def backward(
        self, loss: Tensor, scaler: FixedScaler, router: TokenRouter | None = None
    ) -> None:
        """Backward of a micro-batch: its share of the mean or sum over ranks, scaled.

        Raises:
            ConfigError: the file routes tokens, and the router is missing.
        """
        check_router(self.routing, router)
        scaler.scale(loss / self.batch.accumulation * self.loss_factor).backward()
        if router is not None:
            router.advance()

    def check_gradients(self, optimizer: Optimizer) -> None:
        """See that every parameter has a gradient, and a dtype, as the file wants it.

        Raises:
            ConfigError: names those without.
        """
        check_gradients(params_of(optimizer), self.casts.params, self.allows_unused)

    def complete_gradients(
        self, params: Iterable[Tensor], scaler: torch.amp.GradScaler | None
    ) -> None:
        """Sum and share what spans parts of a model; before gradients are unscaled.

        Raises:
            ConfigError: the model is whole on each rank.
            DivergedError: ranks that share a model have been given different samples.
        """
        parts, params = self.tensor_parallel, list(params)
        if parts is None:
            return
        parts.complete_gradients(params)
        if scaler is not None and scaler.is_enabled():
            parts.share_overflow(params)

    def step(
        self,
        optimizer: Optimizer,
        scaler: FixedScaler,
        scheduler: Schedule | None = None,
        router: TokenRouter | None = None,
    ) -> bool:
        """Unscale, clip, step and clear; after the last backward of an accumulation.

        As in DeepSpeed the schedule waits while steps are skipped.

        Returns:
            Whether the step was taken; on all ranks alike.

        Raises:
            ConfigError: a parameter has no gradient, or a dtype, which the file does not allow;
                or the file routes tokens, and the router is missing.
        """
        check_router(self.routing, router)
        self.check_gradients(optimizer)
        params, parts = params_of(optimizer), self.tensor_parallel
        self.complete_gradients(params, scaler)
        scaler.unscale_(optimizer)
        if self.gradient_clipping > 0:
            clip = nn.utils.clip_grad_norm_ if parts is None else parts.clip_grad_norm_
            clip(params, self.gradient_clipping)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None and not scaler.skipped:
            scheduler.step()
        if router is not None:
            router.step()
        return not scaler.skipped

    def save_model(self, model: nn.Module, folder: str | os.PathLike[str]) -> None:
        """Write full weights in the dtype of computation; see `export_safetensors`.

        Raises:
            ConfigError: at stage 3, the file does not allow to gather them.
        """
        if self.chosen.stage == 3 and not self.gathers_on_save:
            raise ConfigError(
                "stage3_gather_16bit_weights_on_model_save is not set, so weights stay sharded",
                "set it, or save shards with zerofx.checkpoint.save",
            )
        if self.tensor_parallel is not None:
            export_joined(model, folder, self.tensor_parallel, dtype=self.chosen.param_dtype)
        else:
            export_safetensors(model, folder, dtype=self.chosen.param_dtype)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
