"""Cut the joint graph into forward and backward.

What a full weight may not do is decided here: at every stage all forward nodes that depend on
parameters alone are recomputed in backward, so that forward saves shards, never full values.
"""

from __future__ import annotations

import torch
from torch import fx

from zerofx.ir.facts import Role, facts
from zerofx.ir.ops import UNSHARD, is_call
from zerofx.torch_private import must_recompute_tag

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def recompute_parameter_values(graph: fx.Graph) -> list[fx.Node]:
    """Tag forward nodes whose tensor ancestors are all parameters or constants.

    Gathers, views, casts, concatenations, LoRA merges and weight norm are among them; random nodes
    are not. The tags carry no checkpointing region: torch would turn them into saves at its border.

    Returns:
        The tagged nodes.
    """
    constant: set[fx.Node] = set()
    tagged: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            constant.add(node)
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        sources = node.all_input_nodes
        if is_call(node, UNSHARD):
            tagged[node] = None
        elif not _is_impure(node) and all(arg in constant or arg in tagged for arg in sources):
            if any(arg in tagged for arg in sources):
                tagged[node] = None
            else:
                constant.add(node)
    for node in tagged:
        node.meta["recompute"] = must_recompute_tag()
        node.meta.pop("ac_graph_id", None)
    return list(tagged)


def _is_impure(node: fx.Node) -> bool:
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags or node.is_impure()


def order_opaque_values(forward: fx.GraphModule, backward: fx.GraphModule, num_user: int) -> None:
    """Pass device meshes after all saved tensors.

    AOTAutograd expects tensors, then opaque objects, then symbols out of forward, and symbols,
    tensors, opaque objects, tangents into backward. The partitioner puts random states after the
    meshes when a checkpointed region holds dropout.

    Args:
        forward: returns the user's outputs, then what is saved.
        backward: takes what is saved, then the tangents.
        num_user: number of the user's outputs.
    """
    output = forward.graph.output_node()
    values = list(output.args[0])  # pyright: ignore[reportArgumentType]
    saved = values[num_user:]
    output.args = (tuple(values[:num_user] + sorted(saved, key=_forward_place)),)
    nodes = list(backward.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    after = nodes[len(saved)]
    for node in inputs[: len(saved)]:
        if _is_opaque(node):
            after.prepend(node)
    forward.recompile()
    backward.recompile()


def _forward_place(saved: fx.Node) -> int:
    if _is_opaque(saved):
        return 1
    return 2 if isinstance(saved.meta.get("val"), _SYMBOLS) else 0


def _is_opaque(node: fx.Node) -> bool:
    return facts(node).role is Role.MESH
