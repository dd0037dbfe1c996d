"""Programs for tests, built without the frontend.

`trace_joint` traces a function through the markers' autograd, as AOTAutograd would, and writes the
facts; `cut` is a plain partition that recomputes what depends on parameters alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from zerofx.ir import ops
from zerofx.ir.facts import Facts, Role, facts, set_facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Layout, ParamSpec, Region
from zerofx.ir.view import identity_source
from zerofx.sim.lockstep import run_lockstep, shards_of

Read = Callable[[str], Tensor]
"""How a traced function reads a parameter; each call is one marker."""


def layout_of(shards: int = 2, replicas: int = 1, resident: bool = False) -> Layout:
    return Layout(10 * shards + replicas, shards, replicas, resident)


def specs_of(
    shapes: Mapping[str, Sequence[int]],
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float64,
    frozen: Sequence[str] = (),
    small: int = 0,
    param_dtype: torch.dtype | None = None,
) -> dict[str, ParamSpec]:
    """Specs in order; those with fewer than `small` elements, and scalars, are replicated."""
    world = layout.num_shards * layout.num_replicas
    replicated = Layout(1, 1, world, False, reduce_dtype=layout.reduce_dtype)
    out: dict[str, ParamSpec] = {}
    for index, (name, shape) in enumerate(shapes.items()):
        size = torch.Size(shape)
        chosen = layout if len(size) and size.numel() >= small else replicated
        trainable = name not in frozen
        out[name] = ParamSpec(name, index, size, dtype, trainable, chosen, param_dtype=param_dtype)
    return out


@dataclasses.dataclass
class Model:
    """A function of parameters, buffers and inputs, which returns a tuple of tensors.

    Attributes:
        forward: `forward(read, buffers, inputs)`; the first output is the loss.
        params: what `read` knows.
        buffers: values by name; the function returns their new values first, if it updates them.
        inputs: example inputs.
    """

    forward: Callable[[Read, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, ...]]
    params: Mapping[str, ParamSpec]
    inputs: Sequence[Tensor]
    buffers: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.params)

    def plain(
        self, values: Mapping[str, Tensor], buffers: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """Outputs, and gradients of the loss, of one rank without sharding."""
        leaves = {
            name: value.detach().clone().requires_grad_(self.params[name].trainable)
            for name, value in values.items()
        }
        outs = self.forward(
            lambda name: leaves[name].to(self.params[name].full_dtype), buffers, inputs
        )
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads = iter(torch.autograd.grad(outs[0], wanted, allow_unused=True))
        found = [next(grads) if leaf.requires_grad else None for leaf in leaves.values()]
        return tuple(out.detach() for out in outs), found


def trace_joint(model: Model, stage: int = 3) -> Program:
    """The joint program of rank 0: shards, buffers, inputs, tangent → outputs, gradients."""
    module = make_fx(_joint_function(model), tracing_mode="fake")(*_joint_examples(model))
    return _program(model, module, Region.JOINT, stage)


def trace_inference(model: Model, stage: int = 3) -> Program:
    """The program of rank 0 without gradients."""

    def run(*flat: Any) -> tuple[Tensor, ...]:
        shards, buffers, inputs = _split(model, flat)
        read, _ = _reader(model, shards)
        return model.forward(read, buffers, inputs)

    with torch.no_grad():
        module = make_fx(run, tracing_mode="fake")(*_joint_examples(model)[:-1])
    return _program(model, module, Region.INFERENCE, stage)


def cut(joint: Program) -> tuple[Program, Program]:
    """Forward and backward; values that depend on parameters alone are computed in both."""
    late = _depending_on(joint, joint.graph.find_nodes(op="placeholder")[-1:])
    alone = _parameter_values(joint)
    outputs, gradients = (
        joint.outputs[: joint.num_user_outputs],
        joint.outputs[joint.num_user_outputs :],
    )
    backward: dict[fx.Node, None] = {}
    saved: dict[fx.Node, None] = {}
    queue = [node for node in gradients if isinstance(node, fx.Node)]
    while queue:
        node = queue.pop()
        if node in backward or node in saved:
            continue
        if node in late or (node in alone and node.op != "placeholder"):
            backward[node] = None
            queue += node.all_input_nodes
        else:
            saved[node] = None
    tangents = [n for n in late if n.op == "placeholder"]
    order = list(joint.graph.nodes)
    keep = sorted(saved, key=order.index)
    inputs = [n for n in order if n.op == "placeholder" and n not in late]
    body = [n for n in order if n.op != "placeholder" and n.op != "output"]
    first = _extract(joint, inputs, [n for n in body if n not in late], [*outputs, *keep])
    first.graph.eliminate_dead_code()
    first.recompile()
    second = _extract(joint, [*keep, *tangents], [n for n in body if n in backward], gradients)
    later = frozenset(facts(n).param for n in second.graph.nodes if ops.is_call(n, ops.UNSHARD))
    return (
        dataclasses.replace(joint, region=Region.FORWARD, module=first, read_later=later),
        dataclasses.replace(
            joint, region=Region.BACKWARD, module=second, num_user_outputs=len(gradients)
        ),
    )


def inputs_for(
    model: Model,
    values: Mapping[str, Tensor],
    buffers: Sequence[Sequence[Tensor]],
    inputs: Sequence[Sequence[Tensor]],
) -> list[list[Any]]:
    """What each rank passes to the forward (or inference) program; all of it copied."""
    shards = [shards_of(values[name], spec) for name, spec in model.params.items()]
    return [
        [*(parts[rank] for parts in shards), *(b.clone() for b in buffers[rank]), *inputs[rank]]
        for rank in range(len(inputs))
    ]


def run_step(
    forward: Program, backward: Program, inputs: Sequence[Sequence[Any]]
) -> tuple[list[list[Any]], list[list[Any]]]:
    """User outputs and gradients of each rank, in lockstep, for a loss that is output 0."""
    results = run_lockstep(forward, inputs)
    number = forward.num_user_outputs
    given = [[*result[number:], torch.ones_like(result[0])] for result in results]
    return [result[:number] for result in results], run_lockstep(backward, given)


def run_joint(joint: Program, inputs: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Outputs and gradients of each rank, in lockstep."""
    loss = joint.outputs[0].meta["val"]
    one = torch.ones(loss.shape, dtype=loss.dtype)
    return run_lockstep(joint, [[*each, one] for each in inputs])


def _joint_function(model: Model) -> Callable[..., Any]:
    def run(*flat: Any) -> list[Any]:
        *values, tangent = flat
        shards, buffers, inputs = _split(model, values)
        read, leaves = _reader(model, shards)
        outs = model.forward(read, buffers, inputs)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        grads = iter(torch.autograd.grad(outs[0], wanted, tangent, allow_unused=True))
        found = [next(grads) if leaf.requires_grad else None for leaf in leaves.values()]
        nothing = [None] * (len(buffers) + len(inputs))
        return [*(out.detach() for out in outs), *found, *nothing]

    return run


def _reader(model: Model, shards: Sequence[Tensor]) -> tuple[Read, dict[str, Tensor]]:
    leaves = {
        name: shard.detach().requires_grad_(model.params[name].trainable)
        for name, shard in zip(model.params, shards, strict=True)
    }

    def read(name: str) -> Tensor:
        spec, leaf = model.params[name], leaves[name]
        # A DTensor's `to_local` leaves such a view in the graph.
        return ops.UNSHARD(leaf.view(leaf.shape), spec.shape, spec.layout.handle, spec.cast)

    return read, leaves


def _joint_examples(model: Model) -> list[Tensor]:
    shards = [torch.empty(s.shard_shape(0), dtype=s.dtype) for s in model.params.values()]
    return [*shards, *model.buffers.values(), *model.inputs, torch.ones((), dtype=torch.float64)]


def _split(model: Model, flat: Sequence[Any]) -> tuple[Any, Any, Any]:
    first, second = len(model.params), len(model.params) + len(model.buffers)
    return flat[:first], flat[first:second], flat[second:]


def _program(model: Model, module: fx.GraphModule, region: Region, stage: int) -> Program:
    placeholders = module.graph.find_nodes(op="placeholder")
    names = [*model.params, *model.buffers]
    for place, node in enumerate(placeholders):
        record = Facts()
        if place < len(model.params):
            spec = model.params[names[place]]
            record = Facts(Role.SHARD, spec.name, layout=spec.layout.name)
        elif place < len(names):
            record = Facts(Role.BUFFER, names[place])
        set_facts(node, record)
    for node in list(module.graph.nodes):
        if ops.is_call(node, ops.UNSHARD, ops.REDUCE_GRAD):
            _annotate(node)
    module.graph.eliminate_dead_code()
    buffers = dict.fromkeys(model.buffers, 1)
    program = Program(region, module, model.params, stage, 0, buffers=buffers)
    gradients = len(model.params) + len(model.buffers) + len(model.inputs)
    total = len(program.outputs)
    program.num_user_outputs = total - gradients if region is Region.JOINT else total
    return program


def _annotate(marker: fx.Node) -> None:
    place = 0 if ops.is_call(marker, ops.UNSHARD) else 1
    shard = identity_source(marker.args[place])  # type: ignore[arg-type]
    marker.update_arg(place, shard)
    known = facts(shard)
    module = known.param.rpartition(".")[0]
    role = Role.REDUCE if place else Role.FULL
    set_facts(marker, Facts(role, known.param, module, known.layout))


def _depending_on(program: Program, sources: Sequence[fx.Node]) -> dict[fx.Node, None]:
    out = dict.fromkeys(sources)
    for node in program.graph.nodes:
        if node.op != "output" and any(source in out for source in node.all_input_nodes):
            out[node] = None
    return out


def _parameter_values(program: Program) -> dict[fx.Node, None]:
    out: dict[fx.Node, None] = {}
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        is_shard = facts(node).role is Role.SHARD and node.op == "placeholder"
        if is_shard or (sources and node.op != "output" and all(s in out for s in sources)):
            out[node] = None
    return out


def _extract(
    joint: Program, inputs: Sequence[fx.Node], body: Sequence[fx.Node], outputs: Sequence[Any]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in body:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(fx.node.map_arg(list(outputs), copies.__getitem__)))
    return fx.GraphModule(joint.module, graph)
