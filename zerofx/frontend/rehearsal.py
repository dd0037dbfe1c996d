"""The real pipeline without ranks: a model's programs for any stage and any number of ranks.

A model is traced once, on fake tensors: parameters stand for shards of unknown owners, so nothing
depends on a stage or a process group, and no memory is taken. For each stage and world size a copy
goes through the passes that `Capture` would run; where those of the joint graph are the same, it is
cut once for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.config import Inner, ZeroConfig
from zerofx.cost.machine import Machine, machine_of
from zerofx.cost.micro_batches import MicroBatches
from zerofx.errors import UnsupportedError
from zerofx.frontend.annotate import GraphInputs
from zerofx.frontend.capture import Capture
from zerofx.frontend.constructors import construct
from zerofx.frontend.dump import Dump, Reader, run_told
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.joint import copy_module, dynamo_graph
from zerofx.frontend.layouts import WHOLE, buffer_bytes, describe_params, lay_out
from zerofx.frontend.partition import Traced
from zerofx.frontend.predict import Setting
from zerofx.frontend.reads import read_plain
from zerofx.frontend.weigh import Weighing, decided, weigh
from zerofx.ir.facts import facts, set_facts
from zerofx.ir.ops import REDUCE_GRAD, UNSHARD, is_call
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec, Region
from zerofx.passes.pipelines import pipeline
from zerofx.torch_private import as_traced, fake_mode


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """A traced model, which each configuration cuts into forward and backward.

    Attributes:
        traced: before any pass.
        params: all parameters of the model; layouts are those of one rank.
        buffer_bytes: of all buffers of the model.
        device: of the parameters.
        inner: whether it was traced for Inductor or for eager mode.
        runs: how often a step runs it: micro-batches, equal blocks that are compiled alone.
        nested: how many of these runs precede their backward.
    """

    traced: Traced
    params: tuple[ParamSpec, ...]
    buffer_bytes: int
    device: torch.device
    inner: Inner
    runs: float = 1.0
    nested: int = 1
    _cuts: list[Any] = dataclasses.field(default_factory=list[Any], repr=False, compare=False)

    def programs(
        self,
        config: ZeroConfig,
        num_ranks: int,
        readers: Sequence[Reader] = (),
        machine: Machine | None = None,
        weighing: Weighing | None = None,
    ) -> tuple[Program, Program]:
        """Forward and backward as they would run.

        Args:
            config: stage and options; `inner` is that of the rehearsal.
            num_ranks: W.
            readers: are told what each pass does.
            machine: where they would run; by default a typical one.
            weighing: whether codes pay; by default what `weighed` finds.
        """
        machine = machine or machine_of(self.device.type)
        if weighing is None:
            weighing = self.weighed(config, num_ranks, machine)
        passes = decided(pipeline(config, machine.most_bucket_bytes), weighing)
        fused, micro_batches = self.inner == "inductor", MicroBatches.of(config)
        setting = Setting(machine, num_ranks, fused, micro_batches)
        dump = Dump(0, passes, readers, setting) if readers else None
        made = self.halves(config, num_ranks, dump)
        for program in made:
            run_told(program, passes, dump, check=False)
        return made

    def weighed(self, config: ZeroConfig, num_ranks: int, machine: Machine) -> Weighing:
        """Whether codes pay, if `config` leaves that open."""
        if config.quantize != "auto":
            return {}
        halves = self.halves(config, num_ranks)
        passes = pipeline(config, machine.most_bucket_bytes)
        return weigh(passes, halves, machine, fused=self.inner == "inductor")

    def halves(
        self, config: ZeroConfig, num_ranks: int, dump: Dump | None = None
    ) -> tuple[Program, Program]:
        """Forward and backward before the passes of their own; `dump` is told of the joint ones."""
        params = {spec.name: spec for spec in lay_out(self.params, config, num_ranks)}
        forward, backward = self._cut(config, params, dump)
        return _laid(forward, params, config.stage), _laid(backward, params, config.stage)

    def _cut(
        self, config: ZeroConfig, params: Mapping[str, ParamSpec], dump: Dump | None
    ) -> tuple[Program, Program]:
        """The halves for any configuration with these passes of the joint graph."""
        whole = self.traced.program
        if whole.region is Region.INFERENCE:
            return whole, _nothing(whole)
        passes = [each for each in pipeline(config) if Region.JOINT in each.regions]
        gathered = {name for name in whole.params if params[name].layout.temporary}
        for *known, halves in self._cuts:
            if known == [passes, gathered] and dump is None:
                return halves
        joint = _laid(whole, params, config.stage)
        run_told(joint, passes, dump, check=False)
        with as_traced(joint.graph):
            halves = self.traced.cut(joint)
        self._cuts.append((passes, gathered, halves))
        return halves


def rehearse_model(
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple[tuple[Tensor, ...], dict[str, Tensor]]],
    inner: Inner = "inductor",
    cast: torch.dtype | None = None,
) -> Rehearsal:
    """Build and trace a model that takes no memory.

    Args:
        build: makes the model.
        inputs: makes positional and named inputs of its forward.
        inner: `inductor` or `eager`.
        cast: as for `rehearse_graph`.

    Raises:
        UnsupportedError: the model is more than one graph to Dynamo; the message says where.
    """
    with fake_mode():
        model = construct(build)
        args, kwargs = inputs()
        module, values = dynamo_graph(model, args, kwargs)
    return rehearse_graph(module, values, model, inner=inner, cast=cast)


def rehearse_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    root: nn.Module,
    *,
    inner: Inner,
    cast: torch.dtype | None = None,
    evaluated: bool = False,
) -> Rehearsal:
    """Trace Dynamo's graph of a plain model on fake tensors; the graph is left as it is.

    Args:
        module: Dynamo's graph.
        inputs: its inputs, real or fake; parameters are plain.
        root: the model that owns the parameters.
        inner: `inductor` or `eager`.
        cast: dtype of full values and of floating-point inputs, as `param_dtype` asks for.
        evaluated: take a graph without a backward, too: what runs in its place is empty.

    Raises:
        UnsupportedError: there is no backward, and `evaluated` is not set.
    """
    specs = describe_params(root, cast)
    spec_of = dict(zip(map(id, root.parameters()), specs, strict=True))
    params = {place: spec_of[id(v)] for place, v in enumerate(inputs) if id(v) in spec_of}
    owned = {id(buffer): name for name, buffer in root.named_buffers()}
    buffers = {p: (owned[id(v)], WHOLE) for p, v in enumerate(inputs) if id(v) in owned}
    config = ZeroConfig(inner=inner, verify=False, dump="")
    known = GraphInputs(params, buffers, ())
    capture = Capture(config, known, SegmentCompiler(inner, {}), pipeline(config))
    if cast is not None:
        inputs = [v if p in (*params, *buffers) else _cast(v, cast) for p, v in enumerate(inputs)]
    traced = capture.trace(read_plain(module, params), inputs)
    if traced.program.region is Region.INFERENCE and not evaluated:
        raise UnsupportedError("the model has no backward", "leave some parameters trainable")
    device = next(root.parameters()).device
    return Rehearsal(traced, specs, buffer_bytes(root), device, inner)


def _laid(program: Program, params: Mapping[str, ParamSpec], stage: int) -> Program:
    """A copy with these layouts."""
    used = {name: params[name] for name in program.params}
    module = copy_module(program.module)
    _relay(module, used)
    return dataclasses.replace(program, module=module, params=used, stage=stage)


def _nothing(forward: Program) -> Program:
    """The backward of a program that has none."""
    graph = fx.Graph()
    graph.output(())
    module = fx.GraphModule({}, graph)
    return dataclasses.replace(forward, region=Region.BACKWARD, module=module)


def _relay(module: fx.GraphModule, params: Mapping[str, ParamSpec]) -> None:
    """Let the nodes of a traced program say how their parameters lie now."""
    for node in module.graph.nodes:
        record = facts(node)
        if record.param not in params:
            continue
        layout = params[record.param].layout
        if record.layout:
            set_facts(node, dataclasses.replace(record, layout=layout.name))
        if is_call(node, UNSHARD, REDUCE_GRAD):
            node.update_arg(2, layout.handle)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """As `zerofx.sharding.casts` does with inputs of the model."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)
