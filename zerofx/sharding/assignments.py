"""Parameters that change owner after sharding: assigned, tied, deleted, registered elsewhere.

A global hook of torch sees every registration. A sharded parameter makes its new owner read it
through the marker, a `DTensor` that lies like a parameter becomes one, and a plain parameter stays
plain until the next compiled forward of its model, or `zerofx.shard`, shards it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zerofx.errors import ShardingError
from zerofx.runtime.domain import Domain
from zerofx.runtime.handles import live_sessions, sessions_on, states_by_param
from zerofx.runtime.parameter import Sharded
from zerofx.runtime.params import ParamState, adopt_param
from zerofx.runtime.session import Session
from zerofx.sharding.casts import param_dtype_in
from zerofx.sharding.classes import bind, unbind
from zerofx.sharding.reading import bound_states, is_bound
from zerofx.torch_private import holds_a_graph


def install() -> None:
    """Watch registrations of parameters; call once."""
    register_module_parameter_registration_hook(_registered)
    register_module_module_registration_hook(_joined)


def follow_model(session: Session) -> None:
    """Forget parameters that the model no longer has; the others get their names in it.

    A part that was taken out, and is put back, has kept its parameters' states.
    """
    if session.root() is None:
        return
    places = _places(session)
    session.drop([state for state in session.states if state not in places])
    known = set(session.states)
    for state in (each for each in places if each not in known):
        session.states.append(state)
        session.forget_values(state)
    _rename(session.states, places)


def _places(session: Session) -> dict[ParamState, list[str]]:
    """Names of all places where the model has a parameter, by its state."""
    root, places = session.root(), dict[ParamState, list[str]]()
    named = root.named_modules(remove_duplicate=False) if root is not None else ()
    for path, module in named:
        for name, state in bound_states(module).items():
            places.setdefault(state, []).append(f"{path}.{name}".removeprefix("."))
    return places


def _rename(states: Iterable[ParamState], places: Mapping[ParamState, list[str]]) -> None:
    for state in states:
        spec, names = state.spec, places[state]
        name = spec.name if spec.name in names else names[0]
        tied = tuple(each for each in names if each != name)
        if (name, tied) != (spec.name, spec.tied):
            state.spec = dataclasses.replace(spec, name=name, tied=tied)


def _drop(candidates: list[ParamState], session: Session) -> None:
    places = _places(session)
    session.drop([state for state in candidates if state not in places])
    _rename([state for state in candidates if state in places], places)


def _joined(module: nn.Module, name: str, child: nn.Module | None) -> None:
    # `self.layers[:n]` in a forward makes a list of modules: Dynamo is not to trace through here,
    # and what a traced forward reads is looked at by the backend.
    # What `None`, or another module, takes the place of leaves with its parameters.
    if not torch.compiler.is_compiling() and not holds_a_graph(module):
        _announce()


def _announce() -> None:
    """Any model may have got a plain parameter: what was registered may join one later."""
    for session in live_sessions():
        session.may_grow = True


def _registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    if holds_a_graph(module):  # of an optimizer's step, say, which reads what lies at rest
        return
    if param is not None and not isinstance(param, DTensor):
        _announce()
    session, gone = None, list[ParamState]()
    if is_bound(module):
        # Old-style `weight_norm` deletes from the dict itself.
        missing = [known for known in bound_states(module) if known not in module._parameters]
        gone = unbind(module, [*missing, name])
        session = gone[0].domain.session if gone else _session_of_module(module)
    if isinstance(param, DTensor):
        state = states_by_param().get(id(param)) or _adopt(module, name, param, session)
        if state is not None:
            bind(module, {name: state})
    if gone:
        _drop(gone, gone[0].domain.session)


def _session_of_module(module: nn.Module) -> Session | None:
    return next((state.domain.session for state in bound_states(module).values()), None)


def _adopt(
    module: nn.Module, name: str, param: nn.Parameter, session: Session | None
) -> ParamState | None:
    """Make a `DTensor` a parameter of the model on whose mesh it lies; `None` for a stranger.

    A module that is part of no model yet may be another library's, on the same mesh: there only
    what was computed from parameters of a model counts.
    """
    assert isinstance(param, DTensor)
    if session is None:
        session = _session_on(param.device_mesh) if isinstance(param, Sharded) else None
        if session is None:
            return None
    domain = _domain_like(param, session)
    if domain is None:
        raise ShardingError(
            f"{type(module).__name__}.{name} is assigned a DTensor with placements "
            f"{param.placements}",
            "assign a plain nn.Parameter, of which each rank will keep its rows, or a DTensor that "
            "lies as the parameters of the model do",
        )
    dtype = param_dtype_in(module, session.config.param_dtype)
    return adopt_param(domain, _path_of(module, session) + name, param, dtype)


def _path_of(module: nn.Module, session: Session) -> str:
    root = session.root()
    named = root.named_modules() if root is not None else ()
    return next((f"{path}." for path, other in named if other is module and path), "")


def _session_on(mesh: DeviceMesh) -> Session | None:
    """The youngest model on `mesh`, for a module that is not part of a model yet."""
    alive = [session for session in sessions_on(mesh) if session.root() is not None]
    return alive[-1] if alive else None


def _domain_like(param: DTensor, session: Session) -> Domain | None:
    replicated = [Replicate()] * session.mesh.ndim
    if param.device_mesh != session.mesh:
        return None
    if list(param.placements) == replicated:
        return session.replicated
    sharded = [*replicated[1:], Shard(0)]
    fits = list(param.placements) == sharded and session.sharded.layout.sharded
    return session.sharded if fits else None
