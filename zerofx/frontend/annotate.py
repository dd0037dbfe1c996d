"""Write facts on a freshly traced graph: the only place that reads torch's own metadata."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.frontend.roots import live_modules, names_of
from zerofx.ir.facts import Facts, Role, facts, module_path, set_facts
from zerofx.ir.ops import REDUCE_GRAD, UNSHARD, is_call
from zerofx.ir.spec import ParamSpec
from zerofx.ir.view import identity_source
from zerofx.runtime.handles import live_sessions, states_by_param
from zerofx.runtime.params import ParamState
from zerofx.runtime.session import Session
from zerofx.sharding.refuse import GIVE_PLAIN
from zerofx.torch_private import dynamo_input_of, orders_effects


@dataclasses.dataclass(frozen=True)
class GraphInputs:
    """What zerofx knows about the inputs of one Dynamo graph.

    Attributes:
        params: parameter by input position.
        buffers: by input position, the name of each buffer that follows rank 0's, and the handle
            of the layout that holds it.
        kept: positions of all buffers of sharded models.
        sessions: the sharded models whose parameters it reads, the one with most first; if it
            reads none, those of its buffers.
    """

    params: dict[int, ParamSpec]
    buffers: dict[int, tuple[str, int]]
    sessions: tuple[Session, ...]
    kept: frozenset[int] = frozenset()

    @property
    def session(self) -> Session | None:
        """The model whose options apply: the one with most parameters in the graph."""
        return self.sessions[0] if self.sessions else None


def describe_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> GraphInputs:
    """Recognise parameters and buffers among the real inputs of a Dynamo graph.

    Raises:
        UnsupportedError: a parameter is a `DTensor` that zerofx did not make.
    """
    states, named_buffers = states_by_param(), _buffers_by_id()
    found: dict[int, ParamState] = {}
    buffers: dict[int, tuple[Session, str]] = {}
    kept: set[int] = set()
    for position, value in enumerate(inputs):
        if id(value) in states:
            found[position] = states[id(value)]
        elif isinstance(value, DTensor) and isinstance(value, nn.Parameter):
            raise UnsupportedError(
                "the model has DTensor parameters that zerofx did not make",
                GIVE_PLAIN,
                names_of({id(value)}, live_modules())
                or [str(node.target) for node in graph.find_nodes(op="placeholder")][position:][:1],
            )
        elif id(value) in named_buffers:
            kept.add(position)
            session, name = named_buffers[id(value)]
            if session.config.broadcast_buffers:
                buffers[position] = session, name
    readers = [state.domain.session for state in found.values()]
    prefixes = _prefixes(readers, [session for session, _ in buffers.values()])
    owners = owners_in(session.root() for session in prefixes)
    return GraphInputs(
        {place: _qualified(state, prefixes, owners) for place, state in found.items()},
        {
            place: (prefixes[session] + name, session.replicated.layout.handle)
            for place, (session, name) in buffers.items()
        },
        tuple(session for session in prefixes if session in readers or not readers),
        frozenset(kept),
    )


def _prefixes(readers: Iterable[Session], others: Iterable[Session]) -> dict[Session, str]:
    """What to put before the names of each model's values, the model with most parameters first.

    Nothing, unless the graph reads several models: then their classes, numbered if needed.

    Args:
        readers: for each parameter its model.
        others: models whose buffers the graph reads.
    """
    votes = collections.Counter(readers)
    votes.update(dict.fromkeys(others, 0))
    if len(votes) < 2:
        return dict.fromkeys(votes, "")
    out: dict[Session, str] = {}
    for session, _ in votes.most_common():
        kind = type(session.root()).__name__
        alike = sum(prefix.rstrip("0123456789#.") == kind for prefix in out.values())
        out[session] = f"{kind}#{alike + 1}." if alike else f"{kind}."
    return out


def _qualified(
    state: ParamState, prefixes: dict[Session, str], owners: dict[int, tuple[str, ...]]
) -> ParamSpec:
    spec, session = state.spec, state.domain.session
    prefix = prefixes[session]
    tied = tuple(prefix + name for name in spec.tied)
    held = owners.get(id(state.param), ())
    trains = state.param.requires_grad  # by now
    name = prefix + spec.name
    return dataclasses.replace(spec, name=name, tied=tied, owners=held, trainable=trains)


def owners_in(roots: Iterable[nn.Module | None]) -> dict[int, tuple[str, ...]]:
    """For each parameter, by `id`, the classes of the modules that hold it, each once."""
    found: dict[int, dict[str, None]] = {}
    for root in roots:
        for module in root.modules() if root is not None else ():
            # A module's own `parameters` may take nothing, and give what it likes.
            for _, param in nn.Module.named_parameters(module, recurse=False):
                found.setdefault(id(param), {})[type(module).__name__] = None
    return {param: tuple(names) for param, names in found.items()}


def annotate(graph: fx.Graph, inputs: GraphInputs) -> dict[str, ParamSpec]:
    """Attach facts to every node; markers read their shard directly afterwards.

    Returns:
        The parameters of the graph, by name.
    """
    for node in graph.nodes:
        if node.op == "placeholder":
            set_facts(node, _placeholder(node, inputs))
        elif node.op == "call_function":
            set_facts(node, Facts(module=module_path(node)))
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


def _buffers_by_id() -> dict[int, tuple[Session, str]]:
    return {
        id(buffer): (session, name)
        for session in live_sessions()
        if (root := session.root()) is not None
        for name, buffer in root.named_buffers()
    }


def _placeholder(node: fx.Node, inputs: GraphInputs) -> Facts:
    if orders_effects(node):
        return Facts(Role.EFFECT)
    position, attribute = dynamo_input_of(node)
    if position is None:
        return Facts(Role.COMPUTE)
    if position in inputs.params:
        spec = inputs.params[position]
        role = Role.MESH if attribute not in ("", "_local_tensor") else Role.SHARD
        return Facts(role, spec.name, layout=spec.layout.name, tier=spec.tier)
    if position in inputs.buffers:
        name, _ = inputs.buffers[position]
        return Facts(Role.BUFFER, name)
    return Facts(Role.COMPUTE)


def _annotate_marker(node: fx.Node) -> None:
    """Let a marker read the shard itself, and name its parameter."""
    place = 0 if node.target is UNSHARD else 1
    view = node.args[place]
    assert isinstance(view, fx.Node)
    shard = identity_source(view)
    node.update_arg(place, shard)
    known = facts(shard)
    role = Role.FULL if place == 0 else Role.REDUCE
    set_facts(node, Facts(role, known.param, module_path(node), known.layout))
    while view is not shard and not view.users:
        source = view.args[0]
        node.graph.erase_node(view)
        assert isinstance(source, fx.Node)
        view = source
