"""Cut the joint graph into forward and backward.

What a full weight may not do is decided here: at every stage all forward nodes that depend on
parameters alone are recomputed in backward, so that forward saves shards, never full values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from torch import Tensor, fx

from zerofx.frontend.annotate import annotate_saved
from zerofx.frontend.kept_reads import keep_reads
from zerofx.ir.cut import gradient_owners, verify_cut
from zerofx.ir.facts import Role, facts, set_facts
from zerofx.ir.meaning import Meanings
from zerofx.ir.ops import REDUCE_GRAD, UNSHARD, is_call
from zerofx.ir.program import Program
from zerofx.ir.return_rules import is_large
from zerofx.ir.spec import Region
from zerofx.ir.view import is_impure, is_symbol
from zerofx.torch_private import is_tangent, min_cut, must_recompute_tag


@dataclasses.dataclass(frozen=True)
class Traced:
    """A graph as AOTAutograd traced it, before any pass.

    Attributes:
        program: joint; or inference, of a graph without a backward, which is never cut.
        kept: positions of buffers of sharded models among the inputs of Dynamo's graph.
        inputs: of the joint graph.
        options: for torch's partitioner.
    """

    program: Program
    kept: Collection[int] = ()
    inputs: Any = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def cut(self, whole: Program, *, verify: bool = False) -> tuple[Program, Program]:
        """Forward and backward, before the passes of their own.

        Args:
            whole: `program`, or a copy of it, after the passes of the joint graph; it changes.
            verify: compare what the halves compute with what it does.

        Raises:
            VerificationError: they compute something else.
        """
        graph, number = whole.graph, whole.num_user_outputs
        meant = Meanings(whole) if verify else None
        recompute_parameter_values(graph)
        keep_reads(graph, self.kept)
        reduce_in_backward(graph)
        halves = min_cut(whole.module, self.inputs, number, self.options)
        order_opaque_values(*halves, number)
        repeat_constants(halves[0].graph)
        repeat_constants(halves[1].graph)
        owners = gradient_owners(whole)
        forward = dataclasses.replace(whole, region=Region.FORWARD, module=halves[0])
        backward = dataclasses.replace(
            whole, region=Region.BACKWARD, module=halves[1], gradients_of=owners
        )
        if meant is not None:
            verify_cut(whole, forward, backward, meant)
        annotate_saved(forward.graph, backward.graph, number)
        later = frozenset(facts(node).param for node in backward.calls(UNSHARD))
        return dataclasses.replace(forward, read_later=later), backward


def recompute_parameter_values(graph: fx.Graph) -> list[fx.Node]:
    """Tag forward nodes whose tensor ancestors are all parameters or constants, sizes included.

    Gathers, views, casts, concatenations, LoRA merges and weight norm are among them; random nodes
    are not. The tags carry no checkpointing region: torch would turn them into saves at its border.

    Returns:
        The tagged nodes.
    """
    constant: set[fx.Node] = set()
    tagged: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "get_attr" or is_symbol(node):
            constant.add(node)
            continue
        if node.op != "call_function" or node.meta.get("partitioner_tag") == "is_backward":
            continue
        sources = node.all_input_nodes
        if is_call(node, UNSHARD):
            tagged[node] = None
        elif not is_impure(node) and all(arg in constant or arg in tagged for arg in sources):
            if any(arg in tagged for arg in sources):
                tagged[node] = None
            else:
                constant.add(node)
    for node in tagged:
        node.meta["recompute"] = must_recompute_tag()
        node.meta.pop("ac_graph_id", None)
    return list(tagged)


def reduce_in_backward(graph: fx.Graph) -> None:
    """Keep reductions of gradients that depend on no gradient out of forward.

    torch's partitioner takes what it can compute without tangents for forward: zeros that an
    `autograd.Function` gives where an output of it was not used.
    """
    from_tangents: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(source in from_tangents for source in node.all_input_nodes):
            from_tangents.add(node)
        elif is_call(node, REDUCE_GRAD):
            node.meta["partitioner_tag"] = "must_be_in_backward"


def repeat_constants(graph: fx.Graph) -> None:
    """Make constants anew for every reader, next to it.

    AOTAutograd merges equal ones: zeros that two embeddings' gradients are added to, positions,
    masks. A kernel fills them in for nothing; one that lies in memory from the segment of its first
    reader to that of its last is as large as a gradient.
    """
    for node in list(graph.nodes):
        if not _is_large_constant(node):
            continue
        for user in [user for user in node.users if user.op != "output"]:
            with graph.inserting_before(user):
                made = graph.node_copy(node, lambda arg: arg)
            set_facts(made, dataclasses.replace(facts(node), module=facts(user).module))
            user.replace_input_with(node, made)
        if not node.users:
            graph.erase_node(node)


def _is_large_constant(node: fx.Node) -> bool:
    """Whether its values follow from sizes alone, and are more than a few.

    An operator of a library may draw them, and be dear: it runs as often as the user wrote it.
    """
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, Tensor) or is_impure(node):
        return False
    if getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return False
    return all(map(is_symbol, node.all_input_nodes)) and is_large(value)


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


def _forward_place(saved: fx.Node) -> int:
    if _is_opaque(saved):
        return 1
    return 2 if is_symbol(saved) else 0


def _is_opaque(node: fx.Node) -> bool:
    return facts(node).role is Role.MESH
