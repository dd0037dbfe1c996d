"""Write facts on a freshly traced graph: the only place that reads torch's own metadata."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.ir.facts import Facts, Role, facts, set_facts
from zerofx.ir.ops import REDUCE_GRAD, UNSHARD, is_call
from zerofx.ir.spec import ParamSpec
from zerofx.ir.view import identity_source
from zerofx.runtime.handles import live_domains
from zerofx.runtime.params import ParamState
from zerofx.runtime.session import Session
from zerofx.torch_private import dynamo_input_of


@dataclasses.dataclass(frozen=True)
class GraphInputs:
    """What zerofx knows about the inputs of one Dynamo graph.

    Attributes:
        params: parameter by input position.
        buffers: buffer name by input position.
        session: the sharded model; `None` for a graph without parameters.
    """

    params: dict[int, ParamSpec]
    buffers: dict[int, str]
    sessions: tuple[Session, ...]

    @property
    def session(self) -> Session | None:
        """The model whose options apply: the one with most parameters in the graph."""
        return self.sessions[0] if self.sessions else None


def describe_inputs(inputs: Sequence[Any]) -> GraphInputs:
    """Recognise parameters and buffers among the real inputs of a Dynamo graph.

    Raises:
        UnsupportedError: a parameter is a `DTensor` that zerofx did not make.
    """
    states = _states_by_param()
    params: dict[int, ParamSpec] = {}
    buffers: dict[int, str] = {}
    votes: dict[int, tuple[int, Session]] = {}
    named_buffers = _names_by_buffer()
    for position, value in enumerate(inputs):
        state = states.get(id(value))
        if state is not None:
            params[position] = state.spec
            session = state.domain.session
            votes[id(session)] = (votes.get(id(session), (0, session))[0] + 1, session)
        elif isinstance(value, DTensor) and isinstance(value, nn.Parameter):
            raise UnsupportedError(
                "the model has DTensor parameters that zerofx did not make",
                "pass the plain model; zerofx shards it itself",
                [f"graph input {position}, global shape {tuple(value.shape)}"],
            )
        elif id(value) in named_buffers:
            buffers[position] = named_buffers[id(value)]
    ordered = sorted(votes.values(), key=lambda vote: -vote[0])
    return GraphInputs(params, buffers, tuple(session for _, session in ordered))


def annotate(graph: fx.Graph, inputs: GraphInputs) -> dict[str, ParamSpec]:
    """Attach facts to every node; markers read their shard directly afterwards.

    Returns:
        The parameters of the graph, by name.
    """
    for node in graph.nodes:
        if node.op == "placeholder":
            set_facts(node, _placeholder(node, inputs))
        elif node.op == "call_function":
            set_facts(node, Facts(module=_module_path(node)))
    params = {spec.name: spec for spec in inputs.params.values()}
    for node in graph.nodes:
        if is_call(node, UNSHARD, REDUCE_GRAD):
            _annotate_marker(node)
    return params


def annotate_saved(forward: fx.Graph, backward: fx.Graph, num_user_outputs: int) -> None:
    """Name what forward keeps for backward: activations become values of their own.

    Args:
        forward: returns the user's outputs, then what is saved.
        backward: takes it under the same node names.
        num_user_outputs: number of the user's outputs.
    """
    outputs: Any = forward.output_node().args[0]
    saved = {node.name: node for node in outputs[num_user_outputs:] if isinstance(node, fx.Node)}
    for node in backward.nodes:
        if node.op == "placeholder" and node.name in saved:
            known = facts(saved[node.name])
            if known.role is Role.COMPUTE:
                set_facts(node, dataclasses.replace(known, role=Role.SAVED))


def _states_by_param() -> dict[int, ParamState]:
    return {
        id(state.param): state
        for domain in live_domains()
        for state in domain.session.states
        if state.domain is domain
    }


def _names_by_buffer() -> dict[int, str]:
    sessions = {id(domain.session): domain.session for domain in live_domains()}
    return {
        id(buffer): name
        for session in sessions.values()
        if (root := session.root()) is not None
        for name, buffer in root.named_buffers()
    }


def _placeholder(node: fx.Node, inputs: GraphInputs) -> Facts:
    position, attribute = dynamo_input_of(node)
    if position is None:
        return Facts(Role.COMPUTE)
    if position in inputs.params:
        spec = inputs.params[position]
        role = Role.SHARD if attribute == "_local_tensor" else Role.MESH
        return Facts(role, spec.name, layout=spec.layout.name, tier=spec.tier)
    if position in inputs.buffers:
        return Facts(Role.BUFFER, inputs.buffers[position])
    return Facts(Role.COMPUTE)


def _annotate_marker(node: fx.Node) -> None:
    """Let a marker read the shard itself, and name its parameter."""
    place = 0 if node.target is UNSHARD else 1
    view = node.args[place]
    assert isinstance(view, fx.Node)
    shard = identity_source(view)
    node.update_arg(place, shard)
    known = shard.meta["zerofx"]
    role = Role.FULL if place == 0 else Role.REDUCE
    set_facts(node, Facts(role, known.param, _module_path(node), known.layout))
    while view is not shard and not view.users:
        source = view.args[0]
        node.graph.erase_node(view)
        assert isinstance(source, fx.Node)
        view = source


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed([path for path, _ in stack.values()]), "")
    path = re.sub(r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]", r".\1\2\3", str(path))
    return path.partition(".")[2].partition(".")[2] if path.startswith("L.") else path
