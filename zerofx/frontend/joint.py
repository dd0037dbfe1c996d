"""A plain model's joint graph with markers, traced on fake tensors: no ranks, no memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from zerofx.errors import UnsupportedError
from zerofx.torch_private import fake_mode, trace_apart


@dataclasses.dataclass(frozen=True)
class Joint:
    """What AOTAutograd hands to a partition function: forward and backward in one graph.

    Attributes:
        module: the joint graph.
        inputs: its fake inputs.
        num_fwd_outputs: outputs of forward among its outputs.
        options: further arguments of the partitioner.
    """

    module: fx.GraphModule
    inputs: Any
    num_fwd_outputs: int
    options: dict[str, Any]


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph to be edited; facts, fake values and attributes are shared."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    graph.output(result).meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


class _Traced(Exception):
    """Carries a joint graph out of AOTAutograd before anything is compiled."""

    def __init__(self, joint: Joint) -> None:
        super().__init__("traced")
        self.joint = joint


def dynamo_graph(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[fx.GraphModule, list[Any]]:
    """Dynamo's one graph of a call, and its inputs.

    Raises:
        UnsupportedError: Dynamo needs several graphs; it says where and why.
    """
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def record(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append((module, inputs))
        return module.forward

    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend=record, fullgraph=True, dynamic=False)
        compiled(*args, **kwargs)
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} does not run as one graph: {_reason(error)}",
            "a plan needs a forward that torch.compile(model, fullgraph=True) takes, and inputs "
            "that fit it",
        ) from error
    finally:
        torch.compiler.reset()
    if not found:
        raise UnsupportedError(
            f"the forward of {type(model).__name__} computes nothing", "give it parameters to use"
        )
    return found[0]


def trace_joint(module: fx.GraphModule, inputs: Sequence[Any], *, inductor: bool) -> Joint:
    """Trace forward and backward of a Dynamo graph on fake copies of its inputs.

    Raises:
        UnsupportedError: nothing in it is trainable.
    """
    mode = fake_mode()
    with mode:
        fakes = [_fake_copy(value) for value in inputs]
    try:
        trace_apart(module, fakes, mode, inductor=inductor, partition=_carry_out)
    except _Traced as traced:
        return traced.joint
    raise UnsupportedError("the model has no backward", "leave some parameters trainable")


def _carry_out(
    joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any
) -> NoReturn:
    raise _Traced(Joint(joint, inputs, num_fwd_outputs, options))


def _fake_copy(value: Any) -> Any:
    """A fake tensor like `value`; sizes that Dynamo knows as symbols count as what they are now."""
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    shape, stride = ([_fake_copy(n) for n in sizes] for sizes in (value.shape, value.stride()))
    made = torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    return made.requires_grad_(value.requires_grad)


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n  ".join(lines[:12]) or type(error).__name__
