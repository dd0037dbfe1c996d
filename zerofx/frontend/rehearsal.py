"""The real pipeline without ranks: a model's programs for any stage and any number of ranks.

A model is traced and cut once, on fake tensors: parameters stand for shards of unknown owners, so
nothing depends on a stage or a process group, and no memory is taken. For each stage and world size
the two halves are copied and go through the passes that `Capture` would run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from zerofx.config import Inner, ZeroConfig
from zerofx.cost.machine import Machine, machine_of
from zerofx.frontend.annotate import GraphInputs, owners_in
from zerofx.frontend.capture import Capture
from zerofx.frontend.constructors import construct
from zerofx.frontend.dump import Dump, Reader
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.joint import copy_module, dynamo_graph
from zerofx.frontend.predict import Setting
from zerofx.frontend.reads import read_plain
from zerofx.frontend.watch import GraphWatcher
from zerofx.frontend.weigh import Weighing, decided, weigh
from zerofx.ir.facts import facts, set_facts
from zerofx.ir.ops import REDUCE_GRAD, UNSHARD, is_call
from zerofx.ir.parcels import Codec
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout, ParamSpec
from zerofx.passes.base import run_passes
from zerofx.passes.pipelines import pipeline
from zerofx.passes.quantize import why_exact
from zerofx.runtime.axes import layouts_of, replicas_of
from zerofx.runtime.comm import node_size_of
from zerofx.runtime.secondary import check_nodes
from zerofx.sharding.casts import param_dtypes
from zerofx.torch_private import fake_mode

_WHOLE, _SHARDED = 1, 2
"""Handles of the layouts, which nobody opens."""


@dataclasses.dataclass(frozen=True)
class Rehearsal:
    """A traced model, cut into forward and backward.

    Attributes:
        forward: program before any pass but those of the joint graph.
        backward: likewise.
        params: all parameters of the model; layouts are those of one rank.
        buffer_bytes: of all buffers of the model.
        device: of the parameters.
        inner: whether it was traced for Inductor or for eager mode.
        runs: how often a step runs it: micro-batches, equal blocks that are compiled alone.
        nested: how many of these runs precede their backward.
    """

    forward: Program
    backward: Program
    params: tuple[ParamSpec, ...]
    buffer_bytes: int
    device: torch.device
    inner: Inner
    runs: float = 1.0
    nested: int = 1

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
        setting = Setting(machine, num_ranks, self.inner == "inductor")
        dump = Dump(0, passes, readers, setting) if readers else None
        made = self.halves(config, num_ranks)
        for program in made:
            if dump is not None:
                dump.begin(program)
            run_passes(program, passes, check=False, observer=dump)
            if dump is not None:
                dump.end(program)
        return made

    def weighed(self, config: ZeroConfig, num_ranks: int, machine: Machine) -> Weighing:
        """Whether codes pay, if `config` leaves that open."""
        if config.quantize != "auto":
            return {}
        halves = self.halves(config, num_ranks)
        passes = pipeline(config, machine.most_bucket_bytes)
        return weigh(passes, halves, machine, fused=self.inner == "inductor")

    def halves(self, config: ZeroConfig, num_ranks: int) -> tuple[Program, Program]:
        """Forward and backward before their passes."""
        params = {spec.name: spec for spec in lay_out(self.params, config, num_ranks)}
        made: list[Program] = []
        for half in (self.forward, self.backward):
            used = {name: params[name] for name in half.params}
            module = copy_module(half.module)
            _relay(module, used)
            made.append(dataclasses.replace(half, module=module, params=used, stage=config.stage))
        return made[0], made[1]


def lay_out(
    params: Iterable[ParamSpec], config: ZeroConfig, num_ranks: int, *, codes_are_kept: bool = True
) -> list[ParamSpec]:
    """Parameters as `config` lays them out.

    Args:
        params: of the model.
        config: stage and options.
        num_ranks: W.
        codes_are_kept: with `secondary_shards="codes"`, whether there are any: `quantize="auto"`
            may have found that numbers travel.

    Raises:
        UnsupportedError: the replicas do not divide the ranks, or secondary shards could not serve.
    """
    sharded, whole = _layouts(config, num_ranks)
    params = tuple(params)
    least = config.least_sharded(spec.numel for spec in params)
    laid = [
        dataclasses.replace(
            spec,
            layout=sharded if spec.shape and spec.numel >= least and sharded.sharded else whole,
        )
        for spec in params
    ]
    if not (codes_are_kept and sharded.secondary_codes) or config.weight_codec is None:
        return laid
    codec = Codec.parse(config.weight_codec)
    return [
        dataclasses.replace(spec, secondary_codec=codec.name)
        if not why_exact(spec, [codec], config.quantize_exact)
        else spec
        for spec in laid
    ]


def describe_params(model: nn.Module, cast: torch.dtype | None = None) -> tuple[ParamSpec, ...]:
    """The parameters of a plain model, in registration order.

    Args:
        model: the model.
        cast: what the option `param_dtype` asks for.
    """
    alone = Layout(_SHARDED, 2, 1, resident=False)
    owners = owners_in([model])
    dtypes = param_dtypes(model, cast)
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return tuple(
        ParamSpec(
            names[id(param)][0],
            index,
            param.shape,
            param.dtype,
            param.requires_grad,
            alone,
            tuple(names[id(param)][1:]),
            param_dtype=dtypes[id(param)],
            owners=owners.get(id(param), ()),
        )
        for index, param in enumerate(model.parameters())
    )


def buffer_bytes(model: nn.Module) -> int:
    """Memory of all buffers of a model."""
    return sum(buffer.numel() * buffer.dtype.itemsize for buffer in model.buffers())


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
    watcher: GraphWatcher | None = None,
) -> Rehearsal:
    """Trace Dynamo's graph of a plain model on fake tensors; the graph is left as it is.

    Args:
        module: Dynamo's graph.
        inputs: its inputs, real or fake; parameters are plain.
        root: the model that owns the parameters.
        inner: `inductor` or `eager`.
        cast: dtype of full values and of floating-point inputs, as `param_dtype` asks for.
        watcher: is told of the programs.
    """
    specs = describe_params(root, cast)
    spec_of = dict(zip(map(id, root.parameters()), specs, strict=True))
    params = {place: spec_of[id(v)] for place, v in enumerate(inputs) if id(v) in spec_of}
    owned = {id(buffer): name for name, buffer in root.named_buffers()}
    buffers = {p: (owned[id(v)], _WHOLE) for p, v in enumerate(inputs) if id(v) in owned}
    config = ZeroConfig(inner=inner, verify=False, dump="")
    known = GraphInputs(params, buffers, ())
    capture = Capture(config, known, SegmentCompiler(inner, {}), pipeline(config), watcher)
    if cast is not None:
        inputs = [v if p in (*params, *buffers) else _cast(v, cast) for p, v in enumerate(inputs)]
    forward, backward = capture.cut(read_plain(module, params), inputs)
    device = next(root.parameters()).device
    return Rehearsal(forward, backward, specs, buffer_bytes(root), device, inner)


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


def _layouts(config: ZeroConfig, num_ranks: int) -> tuple[Layout, Layout]:
    """Of sharded parameters, and of replicated ones."""
    replicas = replicas_of(config, num_ranks)
    shards = num_ranks // replicas if config.stage > 0 else 1
    per_node = config.ranks_per_node or num_ranks
    node_size = node_size_of(range(shards if shards > 1 else num_ranks), per_node)
    check_nodes(config, shards, node_size)
    whole = node_size_of(range(num_ranks), per_node)
    replicas_of_one = node_size_of(range(0, num_ranks, shards), per_node)
    node_sizes = node_size, whole, replicas_of_one
    return layouts_of(config, num_ranks, shards, node_sizes, (_SHARDED, _WHOLE))
