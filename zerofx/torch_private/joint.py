"""What AOTAutograd and its partitioner say about a joint graph."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    ForwardTokenAOTInput,
    InputMutationAOTOutput,
    PlainAOTInput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
)
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.torch_private.tensors import fake_mode_of


def must_recompute_tag() -> Any:
    """The partitioner's tag for nodes that backward computes again."""
    return CheckpointPolicy.MUST_RECOMPUTE


def must_save_tag() -> Any:
    """The partitioner's tag for nodes that backward may not compute again."""
    return CheckpointPolicy.MUST_SAVE


def dynamo_input_of(node: fx.Node) -> tuple[int | None, str]:
    """Which input of the Dynamo graph an AOTAutograd placeholder is.

    Returns:
        Position, and the attribute of a tensor subclass (`_local_tensor`, …) if it is a part of
        one. `(None, "")` for tangents and the like.
    """
    description, attribute = node.meta.get("desc"), ""
    if isinstance(description, SubclassGetAttrAOTInput):
        attribute = description.attr
        description = description.base
    if isinstance(description, PlainAOTInput):
        return description.idx, attribute
    return None, ""


def orders_effects(node: fx.Node) -> bool:
    """Whether a placeholder is a token: an empty tensor that ties effects to their order."""
    return isinstance(node.meta.get("desc"), ForwardTokenAOTInput)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder is the gradient of an output."""
    return isinstance(node.meta.get("desc"), TangentAOTInput)


def inputs_written(graph: fx.Graph) -> list[fx.Node]:
    """Inputs that the graph writes to: by a copy at its end, or one that AOTAutograd makes then."""
    described: Any = graph.output_node().meta.get("desc") or ()
    after = {each.mutated_input for each in described if isinstance(each, InputMutationAOTOutput)}
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    copied = {copy.args[0] for copy in copies}
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if node in copied or node.meta.get("desc") in after]


def graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Of a graph that is read or edited: its Python is written if somebody calls the module."""
    return _LazyGraphModule(root, graph)


def min_cut(
    joint: fx.GraphModule, inputs: Any, num_fwd_outputs: int, options: dict[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """torch's own cut into forward and backward."""
    return min_cut_rematerialization_partition(
        joint, inputs, num_fwd_outputs=num_fwd_outputs, **options
    )


@contextlib.contextmanager
def as_traced(graph: fx.Graph) -> Iterator[None]:
    """The fake mode in which a graph was traced is on again, whatever is being compiled around.

    Nobody calls the modules that are made meanwhile, so their Python need not be written.
    """
    mode = fake_mode_of(node.meta.get("val") for node in graph.nodes)
    context = tracing(TracingContext(mode))
    with context, mode or contextlib.nullcontext(), _use_lazy_graph_module(True):
        yield
