"""What a `ds_config.json` asks for, ready to train with."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.optim import Optimizer

from zerofx.checkpoint.export import export_safetensors
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.batch import Batch
from zerofx.integrations.deepspeed.choices import OptimizerChoice
from zerofx.integrations.deepspeed.comms import CommsOptions
from zerofx.integrations.deepspeed.dtypes import Casts
from zerofx.integrations.deepspeed.flops import FlopsOptions
from zerofx.integrations.deepspeed.refusals import refuse_uncast, refuse_unused
from zerofx.integrations.deepspeed.report import StepReport
from zerofx.integrations.deepspeed.scaling import Scaling
from zerofx.integrations.deepspeed.schedules import Schedule, Shape
from zerofx.integrations.deepspeed.settings import Row
from zerofx.integrations.tensor_parallel.export import export_joined
from zerofx.integrations.tensor_parallel.parts import TensorParallel
from zerofx.runtime.loss_scale import FixedScaler
from zerofx.runtime.params import params_of


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What `zerofx.from_deepspeed` returns; `print` shows how every key was understood.

    Attributes:
        chosen: options of zerofx, without a mesh.
        batch: sizes, which multiply.
        optimizer: class and parameters, if the file names an optimizer.
        shape: the schedule, if the file names one.
        last_step: at which the schedule goes on; -1: it begins.
        scaling: how losses are scaled.
        casts: what is cast for good before the model is sharded.
        autocast_dtype: of `torch_autocast`, if that is enabled.
        sums_gradients: whether gradients are summed over ranks, where they are averaged else.
        gradient_clipping: largest norm of gradients; 0: they are not clipped.
        steps_per_print: steps between two lines of a report; 0: no lines.
        wall_clock_breakdown: whether a report has times.
        memory_breakdown: whether a report has the memory in use.
        flops: of which step a report shows operations, if of any.
        comms: whose communication it shows, if any.
        monitors: where else figures go, by name, with parameters.
        dump_state: whether a report begins with the table.
        gathers_on_save: whether stage 3 may gather weights to save them in 16 bits.
        node_local: for `checkpoint.save`, `load` and `latest`: whether each node has its own disk.
        drop_last: whether your data loader should leave out a last batch that is not full.
        allows_unused: whether a step may find parameters without a gradient.
        tensor_parallel: how ranks share a model, if they do.
        rows: how each key of the file was understood.
    """

    chosen: ZeroConfig
    batch: Batch
    optimizer: OptimizerChoice | None
    shape: Shape | None
    last_step: int
    scaling: Scaling
    casts: Casts
    autocast_dtype: torch.dtype | None
    sums_gradients: bool
    gradient_clipping: float
    steps_per_print: int
    wall_clock_breakdown: bool
    memory_breakdown: bool
    flops: FlopsOptions | None
    comms: CommsOptions | None
    monitors: Mapping[str, Mapping[str, Any]]
    dump_state: bool
    gathers_on_save: bool
    node_local: bool
    drop_last: bool
    allows_unused: bool
    tensor_parallel: TensorParallel | None
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        table = Table("key", "given", "taken as", "meaning", box=None, pad_edge=False)
        for row in self.rows:
            table.add_row(row.key, str(row.given), row.taken, row.meaning.replace("`", ""))
        text = io.StringIO()
        Console(file=text, width=160, markup=False, highlight=False).print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        return "\n".join([*lines, "", str(self.batch), *self._options()])

    def _options(self) -> list[str]:
        plain = ZeroConfig()
        given = {
            field.name: getattr(self.chosen, field.name) for field in dataclasses.fields(plain)
        }
        shown = {name: value for name, value in given.items() if value != getattr(plain, name)}
        shown = {"stage": self.chosen.stage, **shown}
        shown["passes"] = [getattr(each, "new", each) for each in self.chosen.passes]
        return [f"option {name}: {value}" for name, value in shown.items() if value != []]

    @property
    def config(self) -> ZeroConfig:
        """The options for `zerofx.shard`; with tensor parallelism it needs a process group."""
        if self.tensor_parallel is None:
            return self.chosen
        return dataclasses.replace(self.chosen, mesh=self.tensor_parallel.mesh["data"])

    @property
    def backend(self) -> str:
        """The name for `torch.compile`, such as `zero3`."""
        return f"zero{self.chosen.stage}"

    @property
    def options(self) -> dict[str, Any]:
        """The options for `torch.compile`."""
        return {"config": self.config}

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

    def make_scheduler(self, optimizer: Optimizer) -> Schedule | None:
        """Build the schedule; `None` if the file names none.

        Raises:
            ConfigError: the schedule does not suit the optimizer.
        """
        return None if self.shape is None else Schedule(optimizer, self.shape, self.last_step)

    def make_scaler(self, device: str | None = None) -> FixedScaler:
        """Build the loss scaler; it does nothing in fp32.

        Args:
            device: type of the loss's device; by default `cuda` if there is one, else `cpu`.
        """
        return self.scaling.make(device or _device())

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
    ) -> StepReport:
        """Build what prints as the file asks; its monitors open here, on rank 0.

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
            write=write,
        )
        if self.dump_state:
            report.write(str(self))
        return report

    def backward(self, loss: Tensor, scaler: FixedScaler) -> None:
        """Backward of a micro-batch: its share of the mean or sum over ranks, scaled."""
        summed = self.batch.sharing * (self.batch.groups if self.sums_gradients else 1)
        scaler.scale(loss / self.batch.accumulation * summed).backward()

    def check_gradients(self, optimizer: Optimizer) -> None:
        """See that every parameter has a gradient, and a dtype, as the file wants it.

        Raises:
            ConfigError: names those without.
        """
        if self.casts.params is not None:
            refuse_uncast(params_of(optimizer), self.casts.params)
        if not self.allows_unused:
            refuse_unused(params_of(optimizer))

    def step(
        self, optimizer: Optimizer, scaler: FixedScaler, scheduler: Schedule | None = None
    ) -> bool:
        """Unscale, clip, step and clear; after the last backward of an accumulation.

        As in DeepSpeed the schedule waits while steps are skipped.

        Returns:
            Whether the step was taken; on all ranks alike.

        Raises:
            ConfigError: a parameter has no gradient, or a dtype, which the file does not allow.
        """
        self.check_gradients(optimizer)
        params, parts = params_of(optimizer), self.tensor_parallel
        if parts is not None:
            parts.complete_gradients(params)
            if scaler.is_enabled():
                parts.share_overflow(params)
        scaler.unscale_(optimizer)
        if self.gradient_clipping > 0:
            clip = nn.utils.clip_grad_norm_ if parts is None else parts.clip_grad_norm_
            clip(params, self.gradient_clipping)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scheduler is not None and not scaler.skipped:
            scheduler.step()
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
