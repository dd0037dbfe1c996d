"""Programs take shards: parameters become their local tensors before AOTAutograd sees them.

For inputs of a subclass, as `DTensor` is, it traces a forward twice and every read through the
subclass's own dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.frontend.reads import graphs_with
from zerofx.ir.spec import ParamSpec
from zerofx.runtime.ownership import owner_of
from zerofx.runtime.parameter import Sharded
from zerofx.torch_private import fake_shard, is_checkpoint_call, is_to_local, local_parts


def take_shards(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    params: dict[int, ParamSpec],
    saved: Callable[[], Collection[str]],
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Let a graph take shards instead of parameters, where it reads nothing else of them.

    Args:
        module: Dynamo's graph, edited in place.
        inputs: its inputs.
        params: parameters by input position.
        saved: names of those that backward reads, once the graph was traced.

    Returns:
        Its inputs from now on, fake where they are shards; and what makes real ones of the old.

    Raises:
        UnsupportedError: others are computed from parameters.
    """
    _refuse_computed(module.graph, inputs)
    graphs = list(graphs_with(module, params))
    whole = {spec.name for _, known in graphs for node, spec in known.items() if _reads_more(node)}
    places = [place for place, spec in params.items() if spec.name not in whole]
    for graph, known in graphs:
        nodes = [node for node, spec in known.items() if spec.name not in whole]
        for part in [user for node in nodes for user in node.users if is_to_local(user)]:
            part.replace_all_uses_with(part.all_input_nodes[0])
            graph.erase_node(part)
        if nodes and graph.owning_module is not None:
            graph.owning_module.recompile()
    taken = list(inputs)
    for place in places:
        taken[place] = fake_shard(inputs[place])

    def shards_of(values: Sequence[Any]) -> list[Any]:
        found, whole = list(values), [values[place] for place in places]
        shards = local_parts(whole, Sharded, _unchanged(whole, saved()))
        for place, shard in zip(places, shards, strict=True):
            found[place] = shard
        return found

    return taken, shards_of


def _refuse_computed(graph: fx.Graph, inputs: Sequence[Any]) -> None:
    """torch's fake of what is neither a leaf nor a view is a `DTensor`, whatever its class."""
    computed = [
        str(node.target)
        for node, value in zip(graph.find_nodes(op="placeholder"), inputs, strict=True)
        if isinstance(value, Sharded) and value.grad_fn is not None and not value._is_view()
    ]
    if computed:
        raise UnsupportedError(
            "the compiled model is given what the loop computed from its parameters, which is "
            "sharded as they are",
            "give it the whole, which gradients go through: value.full_tensor()",
            computed,
        )


def _unchanged(params: Sequence[DTensor], saved: Collection[str]) -> Callable[[], None]:
    """What refuses a backward if parameters that it reads got other values since now.

    Autograd looks at local tensors, which operations on a `DTensor` do not count as written.
    """
    owners = filter(None, map(owner_of, params))
    then = [(one.state, one.state.num_edits()) for one in owners if one.state.spec.name in saved]

    def refuse() -> None:
        edited = [state.spec.name for state, number in then if state.num_edits() != number]
        if edited:
            raise UnsupportedError(
                "an optimizer, or the loop, gave parameters other values between a forward and its "
                "backward, which reads them",
                "call backward() before optimizer.step() or the edit, or run the forward again "
                "after it",
                edited,
            )

    return refuse


def _reads_more(node: fx.Node) -> bool:
    return not all(is_to_local(user) or is_checkpoint_call(user) for user in node.users)
