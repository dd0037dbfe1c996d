"""How Dynamo's graph uses parameters, put right before it is traced further.

Inside a captured forward a parameter reads as its full value, whichever way the model gets at it;
and it is never written to, since the write would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx

from zerofx.errors import UnsupportedError
from zerofx.frontend.joint import copy_module
from zerofx.ir.ops import UNSHARD, is_call
from zerofx.ir.spec import ParamSpec
from zerofx.torch_private import (
    ends_where_data_is_assigned,
    is_checkpoint_call,
    is_dtensor_call,
    memory_of,
)

_SPARSE_ARGUMENT: dict[Any, int] = {F.embedding: 6, F.embedding_bag: 7}

Parameters = dict[fx.Node, ParamSpec]


def refuse_uses(module: fx.GraphModule, params: dict[int, ParamSpec]) -> None:
    """Refuse in-place operations on parameters, and sparse gradients of them.

    Args:
        module: Dynamo's graph.
        params: parameters by input position.

    Raises:
        UnsupportedError: names the parameters.
    """
    written: list[str] = []
    sparse: list[str] = []
    for graph, known in graphs_with(module, params):
        values = _values(graph, known)
        written += [spec.name for node, spec in values.items() if _version(node) > 0]
        written += _written_behind_versions(graph, values)
        if ends_where_data_is_assigned(graph.owning_module):
            returned = graph.output_node().all_input_nodes
            written += [values[node].name for node in returned if node in values]
        sparse += [spec.name for node, spec in values.items() if any(map(_is_sparse, node.users))]
    if written:
        raise UnsupportedError(
            "parameters are modified in place inside the compiled forward; the edit would be lost "
            "(Embedding(max_norm=…) does it too)",
            "edit parameters outside the forward, under torch.no_grad(), through "
            "model.parameters()",
            dict.fromkeys(written),
        )
    if sparse:
        raise UnsupportedError(
            "embeddings ask for sparse gradients, which cannot be reduced by rows",
            "build them with sparse=False",
            dict.fromkeys(sparse),
        )


def read_whole(module: fx.GraphModule, inputs: Sequence[Any], params: dict[int, ParamSpec]) -> None:
    """Let operations on a parameter itself work on its full value.

    `sum(p.square().sum() for p in self.parameters())` does not go through the modules' properties.

    Args:
        module: Dynamo's graph, edited in place.
        inputs: its real inputs.
        params: parameters by input position.
    """
    placements = {spec.name: inputs[position].placements for position, spec in params.items()}
    for graph, known in graphs_with(module, params):
        first = next(node for node in graph.nodes if node.op != "placeholder")
        read = {node: [user for user in node.users if not _takes_dtensor(user)] for node in known}
        for node, spec in known.items():
            if not read[node]:
                continue
            with graph.inserting_before(first):
                place = {"grad_placements": placements[spec.name]}
                shard = graph.call_method("to_local", (node,), place)
                args = (shard, spec.shape, spec.layout.handle, spec.cast)
                full = graph.call_function(UNSHARD, args)
            for reader in read[node]:
                reader.replace_input_with(node, full)
        if any(read.values()) and graph.owning_module is not None:
            graph.owning_module.recompile()


def read_plain(module: fx.GraphModule, params: dict[int, ParamSpec]) -> fx.GraphModule:
    """A copy of Dynamo's graph of a plain model that reads its parameters through markers.

    Args:
        module: Dynamo's graph.
        params: parameters by input position; in the copy these inputs stand for shards.
    """
    marked = _copy_with_bodies(module)
    for graph, known in graphs_with(marked, params):
        for node, spec in known.items():
            # One marker a reader, next to it, as a module's property reads: autograd reduces a
            # gradient when it gets to the marker.
            for reader in [user for user in node.users if not is_checkpoint_call(user)]:
                with graph.inserting_before(reader):
                    args = (node, spec.shape, spec.layout.handle, spec.cast)
                    full = graph.call_function(UNSHARD, args)
                reader.replace_input_with(node, full)
        assert graph.owning_module is not None
        graph.owning_module.recompile()
    return marked


def _copy_with_bodies(module: fx.GraphModule) -> fx.GraphModule:
    """A copy to edit, and so of the checkpointed regions it calls."""
    made = copy_module(module)
    for node in made.graph.nodes:
        if is_checkpoint_call(node):
            name = node.args[0].target
            setattr(made, name, _copy_with_bodies(getattr(module, name)))
    return made


def graphs_with(
    module: fx.GraphModule, params: dict[int, ParamSpec]
) -> Iterator[tuple[fx.Graph, Parameters]]:
    """The graph and those of its checkpointed regions, each with the parameters it is given."""
    inputs = list(module.graph.find_nodes(op="placeholder"))
    known = {inputs[position]: spec for position, spec in params.items()}
    yield module.graph, known
    for node in module.graph.nodes:
        if is_checkpoint_call(node):
            body, *operands = node.args
            inner = {place: known[arg] for place, arg in enumerate(operands) if arg in known}
            yield from graphs_with(getattr(module, body.target), inner)


def _values(graph: fx.Graph, known: Parameters) -> Parameters:
    """Parameters and their full values."""
    found = dict(known)
    for node in graph.nodes:
        if is_call(node, UNSHARD) and node.args[0].args[0] in known:
            found[node] = known[node.args[0].args[0]]
    return found


def _version(node: fx.Node) -> int:
    """Dynamo ran the graph on fake tensors, whose version counters tell of writes to views too."""
    value = node.meta.get("example_value")
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _written_behind_versions(graph: fx.Graph, values: Parameters) -> Iterator[str]:
    """Writes through `.data`, which counts no versions but shares memory."""
    names = {_memory(node): spec.name for node, spec in values.items()}
    names.pop(None, None)
    for node in graph.find_nodes(op="call_method"):
        name = names.get(_memory(node.args[0]))
        if name is not None and node.target.endswith("_") and not node.target.endswith("__"):
            yield name


def _memory(node: Any) -> int | None:
    return memory_of(node.meta.get("example_value")) if isinstance(node, fx.Node) else None


def _is_sparse(user: fx.Node) -> bool:
    place = _SPARSE_ARGUMENT.get(user.target)
    if place is None:
        return False
    return bool(user.kwargs.get("sparse", user.args[place] if len(user.args) > place else False))


def _takes_dtensor(user: fx.Node) -> bool:
    return user.op == "output" or is_checkpoint_call(user) or is_dtensor_call(user)
