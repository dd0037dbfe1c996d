"""What a `ds_config.json` asks for, in the terms of zerofx."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from zerofx.config import ZeroConfig
from zerofx.integrations.deepspeed.batch import Batch
from zerofx.integrations.deepspeed.choices import OptimizerChoice
from zerofx.integrations.deepspeed.comms import CommsOptions
from zerofx.integrations.deepspeed.dtypes import Casts
from zerofx.integrations.deepspeed.flops import FlopsOptions
from zerofx.integrations.deepspeed.routing import Routing
from zerofx.integrations.deepspeed.sampling import Sampling
from zerofx.integrations.deepspeed.scaling import Scaling
from zerofx.integrations.deepspeed.schedules import Shape
from zerofx.integrations.deepspeed.settings import Row
from zerofx.integrations.deepspeed.table import options_of, table_of
from zerofx.integrations.tensor_parallel.parts import TensorParallel


@dataclasses.dataclass(frozen=True)
class Understood:
    """What a file asks for; `print` shows how every key was understood.

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
        sampling: which samples a run sees, if the file says so.
        loader: settings for your data loader.
        routing: which layers see some tokens only, if the file says so.
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
    sampling: Sampling | None
    loader: Mapping[str, Any]
    routing: Routing | None
    allows_unused: bool
    tensor_parallel: TensorParallel | None
    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "\n".join([*table_of(self.rows), "", str(self.batch), *options_of(self.chosen)])

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
