"""Shard a model in place: parameters become `DTensor`s, modules read them through markers."""

from __future__ import annotations

import json
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.config import ZeroConfig
from zerofx.errors import ShardingError
from zerofx.runtime.params import ParamState, make_state
from zerofx.runtime.session import Session
from zerofx.sharding import old_handles
from zerofx.sharding.assignments import drop_unowned
from zerofx.sharding.casts import cast_border
from zerofx.sharding.classes import bind, bound_states
from zerofx.sharding.refuse import refuse_parameters, refuse_wrappers
from zerofx.sharding.rows import cut, own_rows


def shard_model(model: nn.Module, config: ZeroConfig) -> Session:
    """Shard every plain parameter of `model` in place.

    Rank 0's parameters and buffers are broadcast. Optimizers that hold the old parameters are
    pointed at the new ones, their state sharded along. Calling it again shards what was added.

    Returns:
        The model's session.

    Raises:
        UnsupportedError: the model, an optimizer or the process group is of a refused kind.
        ShardingError: the model is sharded already, with other options.
        DivergedError: the ranks pass different models.
    """
    refuse_wrappers(model.modules())
    session = session_of(model)
    if session is not None:
        drop_unowned(session)
    known = {id(state.param) for state in session.states} if session else set()
    names = _names_by_parameter(model, known)
    olds = {id(param): param for _, param in model.named_parameters() if id(param) in names}
    refuse_parameters((names[key][0], param) for key, param in olds.items())
    optimizers = old_handles.optimizers_of(list(olds.values()))
    if session is None:
        if not olds:
            raise ShardingError(f"{type(model).__name__} has no parameters", "compile it as it is")
        session = Session(config, next(iter(olds.values())).device)
        cast_border(model, config)
    elif session.config != config:
        raise ShardingError(
            f"{type(model).__name__} is sharded already, with other options: {session.config}",
            "use the same backend and options wherever you compile it",
        )
    _compare_plans(session, [(names[key], param) for key, param in olds.items()])
    _broadcast_buffers(model, session)
    replaced = {
        key: (param, _shard_parameter(param, names[key], session)) for key, param in olds.items()
    }
    _install(model, replaced)
    session.set_root(model)
    for optimizer in optimizers:
        old_handles.move_optimizer(optimizer, replaced, cut)
    old_handles.move_lists(replaced)
    for old, state in replaced.values():
        old_handles.make_stale(old, state.spec.name)
    return session


def session_of(model: nn.Module) -> Session | None:
    """The session of a sharded model; `None` for a plain one.

    Raises:
        ShardingError: parts of the model were sharded separately.
    """
    sessions = {
        id(state.domain.session): state.domain.session
        for module in model.modules()
        for state in bound_states(module).values()
    }
    if len(sessions) > 1:
        raise ShardingError(
            f"parts of {type(model).__name__} were sharded separately",
            "shard the whole model once, before compiling its parts: zerofx.shard(model, config)",
        )
    return next(iter(sessions.values()), None)


def _names_by_parameter(model: nn.Module, known: set[int]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) not in known:
            names.setdefault(id(param), []).append(name)
    return names


def _compare_plans(session: Session, plan: list[tuple[list[str], nn.Parameter]]) -> None:
    """Compare what will be sharded with the other ranks, before the first collective."""
    options = session.config
    head = f"stage {options.stage}, mesh {tuple(session.mesh.shape)}, inner {options.inner}"
    lines = [
        head,
        f"accumulate {options.accumulate}, small below {options.min_shard_numel}",
        f"disabled passes {sorted(options.disable)}, broadcast {options.broadcast_buffers}",
        f"parameters in {options.param_dtype}, reduced in {options.reduce_dtype}",
    ]
    for names, param in plan:
        kind = "" if param.requires_grad else ", frozen"
        lines.append(f"{names[0]}: {param.dtype}{json.dumps(list(param.shape))}{kind}")
    session.journal.compare_plans("\n".join(lines))


def _broadcast_buffers(model: nn.Module, session: Session) -> None:
    for buffer in model.buffers():
        _from_rank_zero(buffer, session)
    session.buffers_agree(model.buffers())


def _shard_parameter(old: nn.Parameter, names: list[str], session: Session) -> ParamState:
    full = old.detach().clone(memory_format=torch.contiguous_format)
    _from_rank_zero(full, session)
    domain = session.domain_for(full.shape)

    def fill(shard: Tensor, resident: Tensor | None) -> None:
        shard.copy_(own_rows(full, domain))
        if resident is not None:
            resident.copy_(full.reshape(-1))

    state = make_state(
        domain, names[0], tuple(names[1:]), full.shape, old.requires_grad, fill, full
    )
    if old.grad is not None:
        state.param.grad = cut(old.grad, state)
    old_handles.move_attributes(old, state.param)
    return state


def _from_rank_zero(value: Tensor, session: Session) -> None:
    comm = session.world
    if comm.size > 1 and value.numel():
        wire = value.detach()
        if wire.dtype is torch.bool:
            wire = wire.view(torch.uint8)
        dist.broadcast(wire, comm.ranks[0], group=comm.group)


def _install(model: nn.Module, replaced: dict[int, tuple[nn.Parameter, ParamState]]) -> None:
    for module in model.modules():
        mine = {
            name: replaced[id(param)][1]
            for name, param in module._parameters.items()
            if id(param) in replaced
        }
        for name, state in mine.items():
            module._parameters[name] = cast(nn.Parameter, state.param)
        if mine:
            bind(module, mine)
