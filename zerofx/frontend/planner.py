"""What a step will hold, send and take, for any stage and any number of ranks.

The programs are the real ones (`zerofx.frontend.rehearsal`); nothing of the model is materialised.
A deep stack of equal blocks is traced at two depths and extrapolated (`zerofx.cost.lines`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.config import ZeroConfig
from zerofx.cost.forecast import Forecast
from zerofx.cost.lines import NotAlikeError
from zerofx.cost.machine import Machine
from zerofx.cost.memory import Precision, precision_of
from zerofx.cost.surface import peak_expression
from zerofx.errors import UnsupportedError
from zerofx.frontend.constructors import cast_params, construct
from zerofx.frontend.layouts import buffer_bytes, describe_params, lay_out, warn_of_idle_patterns
from zerofx.frontend.rehearsal import Rehearsal, rehearse_model
from zerofx.frontend.resident import rest_of, update_seconds
from zerofx.frontend.stacks import as_read, shorten, stack_depth
from zerofx.frontend.traffic import Traffic, total_of
from zerofx.frontend.views import Programs, Times, View, grow, look
from zerofx.frontend.weigh import CODING, Weighing, otherwise, pays, with_seconds
from zerofx.ir.spec import ParamSpec
from zerofx.option_checks import at_stage
from zerofx.passes.buckets import default_target
from zerofx.torch_private import fake_mode

Inputs = Callable[[int, int], tuple[tuple[Tensor, ...], dict[str, Tensor]]]
"""One batch, for `(batch size, length)`."""


@dataclasses.dataclass(frozen=True)
class StagePlan:
    """One stage.

    Attributes:
        stage: ZeRO stage.
        forecast: memory as a function of the batch size.
        times: of a step with the batch size that was asked for.
        traffic: what a rank sends per step.
        weighed: whether codes pay, if that was left open.
    """

    stage: int
    forecast: Forecast
    times: Times
    traffic: Traffic
    weighed: Weighing

    @property
    def sent_bytes(self) -> int:
        """That a rank sends per step."""
        return total_of(self.traffic)[0]

    @property
    def across_bytes(self) -> int:
        """Those of them that leave its node."""
        return total_of(self.traffic)[1]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Some stages of one model.

    Attributes:
        num_params: Ψ.
        num_trained: those that are read, and not frozen.
        unread: names of parameters that forward does not read: they have no gradients.
        depth: blocks in the model's stack, if it was extrapolated; else 0.
        traced: depths that were traced, if so.
        stages: the plans, by stage.
        precision: of its parameters, and of the optimizer.
    """

    num_params: int
    num_trained: int
    unread: tuple[str, ...]
    depth: int
    traced: tuple[int, ...]
    stages: Mapping[int, StagePlan]
    precision: Precision


@dataclasses.dataclass(frozen=True)
class Planner:
    """Makes plans of one model.

    Attributes:
        build: makes the model; called within a fake mode.
        inputs: makes its inputs.
        config: options but for the stage.
        machine: where it will train.
        precision: that was asked for; without master weights parameters stay as they are.
        num_ranks: W.
        batch: micro-batch size of a rank.
        length: S of the inputs.
        whole: trace the whole depth, however deep.
        say: called with what begins.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs
    config: ZeroConfig
    machine: Machine
    precision: Precision
    num_ranks: int
    batch: int
    length: int
    whole: bool = False
    say: Callable[[str], None] = lambda what: None

    def plan(self, stages: Sequence[int] = (0, 1, 2, 3), *, again: bool = False) -> Plan:
        """Trace the model, and look at each stage.

        Args:
            stages: to look at.
            again: it looked at this model before, and has warned of what is wrong with options.

        Raises:
            UnsupportedError: the model does not trace as one graph.
        """
        self.say("building the model")
        with fake_mode():
            model = construct(lambda: self._model(0))
        if not again:
            warn_of_idle_patterns(model, self.config)
        params = describe_params(model, self.config.param_dtype)
        depth = 0 if self.whole else stack_depth(model)
        buffers = buffer_bytes(model)
        few = self._settled(params, depth) if depth else 0
        blocks = (few, few + 1, depth) if few + 1 < depth else None
        weighed: dict[int, Weighing] = {}
        try:
            views = self._views(params, stages, blocks, weighed)
        except (NotAlikeError, UnsupportedError):
            if blocks is None:
                raise
            blocks = None  # its blocks are not alike after all, or its forward counts them
            weighed.clear()
            views = self._views(params, stages, None, weighed)
        params, idle = as_read(params, views[stages[0]].read, shortened=blocks is not None)
        plans = {
            stage: self._stage_plan(stage, views[stage], params, buffers, weighed[stage])
            for stage in stages
        }
        numel, trained = sum(s.numel for s in params), sum(s.numel for s in params if s.trainable)
        precision, traced = precision_of(params, self.precision), blocks[:2] if blocks else ()
        return Plan(numel, trained, idle, depth if blocks else 0, traced, plans, precision)

    def closed_forms(self, plan: Plan) -> dict[int, Any]:
        """Peak memory of each stage in batch size and length (`zerofx.cost.surface`).

        Args:
            plan: what `plan` made, of the stages.

        Raises:
            NotAlikeError: the programs depend on the length by more than their shapes.
            UnsupportedError: the model does not trace as one graph.
        """
        step, stages = max(2, self.length // 4), tuple(plan.stages)
        plans = {self.length: plan}
        for length in (self.length + step, self.length + 2 * step):
            self.say(f"length {length}")
            plans[length] = dataclasses.replace(self, length=length).plan(stages, again=True)
        return {
            stage: peak_expression({s: plan.stages[stage].forecast for s, plan in plans.items()})
            for stage in stages
        }

    def _settled(self, params: Sequence[ParamSpec], depth: int) -> int:
        """Blocks that a shallow model needs for as much to be in flight as in the whole one.

        Gathers run ahead, and reductions behind, by about the largest parameter or bucket.
        """
        sizes = [spec.full_bytes for spec in params]
        block = sum(s.full_bytes for s in params if re.search(r"\d", s.name)) // depth
        return 3 + math.ceil(2 * max(*sizes, self.machine.most_bucket_bytes) / max(1, block))

    def _model(self, depth: int) -> nn.Module:
        model = self.build()
        if self.precision.name == "mixed":
            cast_params(model, torch.bfloat16)
        if depth:
            shorten(model, depth)
        return model

    def _views(
        self,
        params: Sequence[ParamSpec],
        stages: Sequence[int],
        blocks: tuple[int, int, int] | None,
        weighed: dict[int, Weighing],
    ) -> dict[int, View]:
        """Each stage's programs: from two depths for a third one, or of the model as it is."""
        configs = {stage: self._config_at(stage, params) for stage in stages}
        if blocks is None:
            return self._at_depth(configs, 0, weighed)
        few, more = (self._at_depth(configs, each, weighed) for each in blocks[:2])
        return {stage: grow(few[stage], more[stage], blocks, stage) for stage in stages}

    def _at_depth(
        self, configs: Mapping[int, ZeroConfig], depth: int, weighed: dict[int, Weighing]
    ) -> dict[int, View]:
        """Programs of two batch sizes, of others if those of the first differ."""
        # Programs of one sample may differ from all others: sizes of 1 drop out.
        batch = max(2, self.batch)
        try:
            return self._at_batches(configs, depth, (batch, batch + 1), weighed)
        except NotAlikeError:
            # By chance, as where the batch is as large as another extent.
            return self._at_batches(configs, depth, (batch + 3, batch + 5), weighed)

    def _at_batches(
        self,
        configs: Mapping[int, ZeroConfig],
        depth: int,
        batches: tuple[int, int],
        weighed: dict[int, Weighing],
    ) -> dict[int, View]:
        """Whether codes pay is found once for all of a stage."""
        where = f"{depth} blocks" if depth else "the model"
        config, rehearsals = self.config, list[Rehearsal]()
        for size in batches:
            self.say(f"tracing {where} at batch size {size}")
            model = functools.partial(self._model, depth)
            inputs = functools.partial(self.inputs, size, self.length)
            rehearsals.append(rehearse_model(model, inputs, config.inner, config.param_dtype))
        views: dict[int, View] = {}
        for stage, chosen in configs.items():
            self.say(f"running the passes of stage {stage} on {where}")
            if stage not in weighed:
                weighed[stage] = rehearsals[0].weighed(chosen, self.num_ranks, self.machine)
            made = functools.partial(_programs, rehearsals, chosen, self.num_ranks, self.machine)
            views[stage] = look(
                made(weighed[stage]),
                batches,
                self.batch,
                self.machine,
                fused=config.inner == "inductor",
                otherwise={name: made(w) for name, w in otherwise(weighed[stage]).items()},
            )
        return views

    def _config_at(self, stage: int, params: Sequence[ParamSpec]) -> ZeroConfig:
        """The options at a stage; buckets are those of the whole model, of shallow ones too."""
        config = at_stage(self.config, stage)
        if config.bucket_bytes is not None:
            return config
        laid = lay_out(params, config, self.num_ranks)
        target = default_target(laid, self.machine.most_bucket_bytes)
        return dataclasses.replace(config, bucket_bytes=target)

    def _stage_plan(
        self,
        stage: int,
        view: View,
        params: Iterable[ParamSpec],
        buffers: int,
        weighed: Weighing,
    ) -> StagePlan:
        laid, resident = rest_of(
            params,
            at_stage(self.config, stage),
            self.num_ranks,
            precision=self.precision,
            buffers=buffers,
            device=self.machine.device,
            coded=[each.name for each in CODING if pays(weighed, each.name)],
            accumulates=False,
        )
        forecast = Forecast(resident, view.forward, view.backward, view.lasting)
        times = dataclasses.replace(view.times, update=update_seconds(laid, resident, self.machine))
        others = {name: other.programs for name, other in view.otherwise.items()}
        timed = with_seconds(weighed, times.programs, others)
        return StagePlan(stage, forecast, times, view.traffic, timed)


def _programs(
    rehearsals: Iterable[Rehearsal],
    config: ZeroConfig,
    num_ranks: int,
    machine: Machine,
    weighing: Weighing,
) -> tuple[Programs, Programs]:
    """Of the same model with two batch sizes."""
    one, other = (each.programs(config, num_ranks, (), machine, weighing) for each in rehearsals)
    return one, other
