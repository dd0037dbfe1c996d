"""How Dynamo's graph uses parameters, put right before it is traced further.

Inside a captured forward a parameter reads as its full value, whichever way the model gets at it;
and it is never written to, since the write would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.frontend.bodies import bodies_of, copy_with_bodies, write_out_regions
from zerofx.ir.ops import UNSHARD, is_call
from zerofx.ir.spec import ParamSpec
from zerofx.runtime.handed_out import EDIT_OUTSIDE
from zerofx.runtime.parameter import local_tensor
from zerofx.torch_private import (
    ends_where_data_is_assigned,
    guard_shape,
    is_checkpoint_call,
    is_dtensor_call,
    loses_numbers,
    memory_of,
)

_SPARSE_ARGUMENT: dict[Any, int] = {F.embedding: 6, F.embedding_bag: 7}

Parameters = dict[fx.Node, ParamSpec]


def refuse_uses(module: fx.GraphModule, params: dict[int, ParamSpec]) -> None:
    """Refuse in-place operations on parameters, sparse gradients of them, and writes torch loses.

    Args:
        module: Dynamo's graph.
        params: parameters by input position.

    Raises:
        UnsupportedError: names the parameters, or the numbers.
    """
    written: list[str] = []
    sparse: list[str] = []
    for graph, known in graphs_with(module, params):
        values = _values(graph, known)
        written += [spec.name for node, spec in values.items() if _version(node) > 0]
        written += _written_behind_versions(graph, values)
        sparse += [spec.name for node, spec in values.items() if any(map(_is_sparse, node.users))]
    if written:
        raise UnsupportedError(
            "parameters are modified in place inside the compiled forward; the edit would be lost "
            "(Embedding(max_norm=…) does it too)",
            EDIT_OUTSIDE,
            dict.fromkeys(written),
        )
    if sparse:
        raise UnsupportedError(
            "embeddings ask for sparse gradients, which cannot be reduced by rows",
            "build them with sparse=False",
            dict.fromkeys(sparse),
        )
    if put := [str(each.target) for each in _put_in_place(*next(graphs_with(module, params)))]:
        raise UnsupportedError(
            "other tensors were put in the place of parameters of what torch.compile returned",
            "torch.func.functional_call(model, values, …) of the model itself, which runs op by op",
            dict.fromkeys(put),
        )
    if loses_numbers() and (lost := [str(each.target) for each in _numbers_written(module.graph)]):
        raise UnsupportedError(
            "the compiled forward writes to numbers in float64 on a CPU, and torch before 2.15, "
            "which takes them for Python's, never writes them back",
            "give them a dimension, torch.zeros(1, dtype=torch.float64), or another dtype; or "
            "assign them: self.total = self.total + value",
            lost,
        )


def _put_in_place(graph: fx.Graph, known: Parameters) -> Iterator[fx.Node]:
    """Inputs that modules read in the place of parameters."""
    read = (_parameter(node) for node in graph.nodes if is_call(node, UNSHARD))
    return (node for node in read if node.op == "placeholder" and node not in known)


def _numbers_written(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        plain = isinstance(value, Tensor) and not isinstance(value, DTensor)
        if plain and _is_number_on_cpu(value) and _version(node) > 0:
            yield node


def _is_number_on_cpu(value: Tensor) -> bool:
    return not value.ndim and value.dtype is torch.float64 and value.device.type == "cpu"


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
            if graph is module.graph:
                guard_shape(node)
            with graph.inserting_before(max(first, node.next)):  # torch 2.11: inputs come late, too
                place = {"grad_placements": placements[spec.name]}
                shard = graph.call_method("to_local", (node,), place)
                args = (shard, spec.shape, spec.layout.handle, spec.cast)
                full = graph.call_function(UNSHARD, args)
            for reader in read[node]:
                reader.replace_input_with(node, full)
        made = _take_computed(graph, known, inputs_too=graph is not module.graph)
        if ends_where_data_is_assigned(graph.owning_module):
            made |= _return_once(graph, known)
        if (made or any(read.values())) and graph.owning_module is not None:
            graph.owning_module.recompile()


def _return_once(graph: fx.Graph, known: Parameters) -> bool:
    """Return a full value in the place of its aliases: `w.data = w.data.to(x.device)` is nothing.

    Programs copy what they return, each output by itself.
    """
    values = {_memory(node): node for node in _values(graph, known) if node not in known}
    values.pop(None, None)
    outputs = graph.output_node()
    aliases = {
        node: values[_memory(node)]
        for node in outputs.all_input_nodes
        if _memory(node) in values and _like(node) == _like(values[_memory(node)])
    }
    outputs.args = fx.map_arg(outputs.args, lambda node: aliases.get(node, node))
    return bool(aliases)


def _like(node: fx.Node) -> tuple[Any, ...]:
    value: Tensor = node.meta["example_value"]
    return value.shape, value.stride(), value.dtype, value.storage_offset()


def _take_computed(graph: fx.Graph, known: Parameters, *, inputs_too: bool) -> bool:
    """Let modules read what was computed in the place of their parameters as it is.

    `functional_call(net, {name: 2 * param …}, x)`: full values are computed from full values.

    Args:
        graph: Dynamo's, or one inside it.
        known: its parameters.
        inputs_too: whether other inputs are computed: those of a graph inside it are.

    Returns:
        Whether there are any.
    """
    computed = [
        node
        for node in graph.nodes
        if is_call(node, UNSHARD)
        and (source := _parameter(node)) not in known
        and (inputs_too or source.op != "placeholder")
    ]
    for node in computed:
        shard, _, _, cast_to = cast(tuple[Any, ...], node.args)
        with graph.inserting_before(node):
            value = _parameter(node)
            made = graph.call_method("to", (value, cast_to)) if cast_to is not None else value
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        if not shard.users:
            graph.erase_node(shard)
    return bool(computed)


def read_plain(module: fx.GraphModule, params: dict[int, ParamSpec]) -> fx.GraphModule:
    """A copy of Dynamo's graph of a plain model that reads its parameters through markers.

    Args:
        module: Dynamo's graph.
        params: parameters by input position; in the copy these inputs stand for shards.
    """
    marked = copy_with_bodies(module)
    write_out_regions(marked)
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


def returned(module: fx.GraphModule, params: dict[int, ParamSpec]) -> dict[int, int]:
    """Which outputs of a graph are full values: positions of their parameters by their own."""
    inputs = {node: place for place, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    values = _values(
        module.graph, {node: params[at] for node, at in inputs.items() if at in params}
    )
    outputs: Any = module.graph.output_node().args[0]
    return {
        place: inputs[_parameter(node)]
        for place, node in enumerate(outputs)
        if node in values and node not in inputs
    }


def graphs_with(
    module: fx.GraphModule, params: dict[int, ParamSpec]
) -> Iterator[tuple[fx.Graph, Parameters]]:
    """The graph and those inside it, each with the parameters that it is given.

    Checkpointed regions are given parameters, and what other operators run is given full values.
    """
    inputs = list(module.graph.find_nodes(op="placeholder"))
    known = {inputs[position]: spec for position, spec in params.items()}
    yield module.graph, known
    for node in module.graph.nodes:
        inner: dict[int, ParamSpec] = {}
        if is_checkpoint_call(node):
            operands = node.args[1:]
            inner = {place: known[arg] for place, arg in enumerate(operands) if arg in known}
        for body in bodies_of(module, node):
            yield from graphs_with(body, inner)


def _values(graph: fx.Graph, known: Parameters) -> Parameters:
    """Parameters and their full values."""
    found = dict(known)
    for node in graph.nodes:
        if is_call(node, UNSHARD) and _parameter(node) in known:
            found[node] = known[_parameter(node)]
    return found


def _parameter(full: fx.Node) -> fx.Node:
    """The parameter whose full value a node is, by way of its shard."""
    shard: Any = full.args[0]
    return cast(fx.Node, shard.args[0])


def _version(node: fx.Node) -> int:
    """Dynamo ran the graph on fake tensors, whose version counters tell of writes to views too."""
    value = node.meta.get("example_value")
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _written_behind_versions(graph: fx.Graph, values: Parameters) -> Iterator[str]:
    """Writes through `.data`, which has versions of its own, and by `torch._foreach_…_`."""
    names = {_memory(node): spec.name for node, spec in values.items()}
    names.pop(None, None)
    for node in graph.nodes:
        written = [node] if _version(node) > 0 else _written_as_list(node)
        yield from (names[key] for key in map(_memory, written) if key in names)


def _written_as_list(node: fx.Node) -> Sequence[Any]:
    """The members of a list that an operation writes to: fake tensors do not count that."""
    name = str(getattr(node.target, "__name__", ""))
    in_place = name.startswith("_foreach_") and name.endswith("_")
    return cast(Sequence[Any], node.args[0]) if in_place else ()


def _memory(node: Any) -> tuple[bool, int | None] | None:
    """Names the memory of a node's tensor, and whether that is a `DTensor`.

    A shard's version says nothing: it is a view, and making fake views counts.
    """
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    if isinstance(value, DTensor):
        return True, memory_of(local_tensor(value))
    return (False, memory_of(value)) if isinstance(value, Tensor) else None


def _is_sparse(user: fx.Node) -> bool:
    place = _SPARSE_ARGUMENT.get(user.target)
    if place is None:
        return False
    return bool(user.kwargs.get("sparse", user.args[place] if len(user.args) > place else False))


def _takes_dtensor(user: fx.Node) -> bool:
    return user.op == "output" or is_checkpoint_call(user) or is_dtensor_call(user)
