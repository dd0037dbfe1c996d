"""Shard a model in place: parameters become `DTensor`s, modules read them through markers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofx.config import ZeroConfig, differences
from zerofx.errors import ShardingError
from zerofx.runtime.collectives import broadcast
from zerofx.runtime.dtensor_rules import answer_libraries
from zerofx.runtime.host_memory import keep_freed_memory
from zerofx.runtime.params import ParamState, make_state
from zerofx.runtime.session import Session
from zerofx.runtime.user_classes import follow_class
from zerofx.sharding import materialise, old_handles, unrecorded
from zerofx.sharding.assignments import follow_model
from zerofx.sharding.casts import cast_border, param_dtypes
from zerofx.sharding.classes import bind
from zerofx.sharding.comparisons import refuse_comparisons
from zerofx.sharding.reading import bound_states
from zerofx.sharding.recorder import refuse_inside_block
from zerofx.sharding.refuse import (
    refuse_buffers,
    refuse_parameters,
    refuse_shared_memory,
    refuse_wrappers,
)
from zerofx.sharding.rows import cut, own_rows
from zerofx.sharding.stale import make_attributes_stale, make_stale, make_views_stale

MakeValues = Callable[[nn.Module, Session], dict[int, Tensor]]
"""Makes what a model on the meta device lacks: this rank's rows, by the parameter's `id`."""

_Waiting = tuple[tuple[nn.Module, contextlib.ExitStack], ...]
_waiting: ContextVar[_Waiting] = ContextVar("in no_sync, and not sharded yet", default=())


@torch.inference_mode(mode=False)
def shard_model(
    model: nn.Module,
    config: ZeroConfig,
    passes: Sequence[str] = (),
    make_values: MakeValues = materialise.make_values,
) -> Session:
    """Shard every plain parameter of `model` in place.

    Rank 0's parameters and buffers are broadcast, also to ranks that have them on the meta device.
    Where rank 0 has none either, each rank makes its own rows. Optimizers that hold the old
    parameters are pointed at the new ones, their state sharded along. Calling it again shards what
    was added.

    Args:
        model: the model.
        config: the user's choices.
        passes: lines that describe the passes, which ranks compare too.

    Returns:
        The model's session.

    Raises:
        UnsupportedError: the model or the process group is of a refused kind.
        ShardingError: the model is sharded already, with other options.
        DivergedError: the ranks pass different models.
    """
    refuse_inside_block()
    refuse_wrappers(model.modules())
    refuse_comparisons(model)
    session = session_of(model)
    if session is not None:
        follow_model(session)
    known = {id(state.param) for state in session.states} if session else set()
    names = _names_by_parameter(model, known)
    olds = {
        id(param): param for _, param in nn.Module.named_parameters(model) if id(param) in names
    }
    named = [(names[key][0], param) for key, param in olds.items()]
    refuse_parameters(named)
    refuse_buffers(model.named_buffers(), again=bool(known))
    refuse_shared_memory([*named, *model.named_buffers()])
    holders = old_handles.holders_of(list(olds.values()))
    if session is None:
        if not olds:
            raise ShardingError(f"{type(model).__name__} has no parameters", "compile it as it is")
        least = config.least_sharded(param.numel() for param in olds.values())
        answer_libraries()
        session = Session(config, materialise.device_of(model), least)
    elif session.config != config:
        raise ShardingError(
            f"{type(model).__name__} is sharded already, with other options",
            "use the same backend and options wherever you compile it",
            differences(session.config, config),
        )
    given = _first_rank_has_values(model, session)
    plan = [(names[key], param) for key, param in olds.items()]
    # Later, ranks may have assigned tensors of their own shapes to buffers.
    buffers = [] if known else list(model.named_buffers())
    _compare_plans(session, plan, buffers, passes, given)
    moves = bool(materialise.on_meta(model))  # what constructors computed is on the CPU yet
    rows = {} if given else make_values(model, session)
    _broadcast_buffers(model, session, moves=moves, again=bool(known))
    unrecorded.clear_marks(model)
    dtypes = param_dtypes(model, config.param_dtype)

    def sharded(key: int, old: nn.Parameter) -> ParamState:
        return _shard_parameter(old, names[key], session, rows.pop(key, None), dtypes[key])

    replaced = {key: (param, sharded(key, param)) for key, param in olds.items()}
    _install(model, replaced)
    root = session.root()
    if root is None or model not in root.modules():
        session.set_root(model)
        cast_border(model, config)
    if known:
        follow_model(session)  # names begin at the root
    for optimizer in holders.optimizers:
        old_handles.move_optimizer(optimizer, replaced, cut)
    make_attributes_stale(model, replaced)
    old_handles.move_collections(holders, replaced)
    make_views_stale(holders.views, replaced)
    for old, state in replaced.values():
        make_stale(old, state.spec.name)
    if config.keep_freed_memory and session.device.type == "cpu":
        keep_freed_memory()
    for waiting, opened in _waiting.get():
        if id(session) in _sessions(waiting):
            opened.enter_context(session.accumulation.no_sync())
    return session


@contextlib.contextmanager
def no_sync_once_sharded(model: nn.Module) -> Iterator[None]:
    """`no_sync` around the first forward, which shards `model`."""
    with contextlib.ExitStack() as opened:
        token = _waiting.set((*_waiting.get(), (model, opened)))
        try:
            yield
        finally:
            _waiting.reset(token)


def session_of(model: nn.Module) -> Session | None:
    """The session of a sharded model; `None` for a plain one.

    Raises:
        ShardingError: parts of the model were sharded separately.
    """
    sessions = _sessions(model)
    if len(sessions) > 1:
        raise ShardingError(
            f"parts of {type(model).__name__} were sharded separately",
            "shard the whole model once, before compiling its parts: zerofx.shard(model, config)",
        )
    return next(iter(sessions.values()), None)


def _sessions(model: nn.Module) -> dict[int, Session]:
    return {
        id(state.domain.session): state.domain.session
        for module in model.modules()
        for state in bound_states(module).values()
    }


def _names_by_parameter(model: nn.Module, known: set[int]) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    # A model's own `named_parameters` may take nothing, and leave some out.
    for name, param in nn.Module.named_parameters(model, remove_duplicate=False):
        if id(param) not in known:
            names.setdefault(id(param), []).append(name)
    return names


def _first_rank_has_values(model: nn.Module, session: Session) -> bool:
    told = session.journal.from_first_rank
    return told(lambda: "" if materialise.on_meta(model) else "yes") == "yes"


def _compare_plans(
    session: Session,
    plan: list[tuple[list[str], nn.Parameter]],
    buffers: list[tuple[str, Tensor]],
    passes: Sequence[str],
    given: bool,
) -> None:
    """Compare what will be sharded with the other ranks, before the first collective."""
    options = session.config
    head = f"stage {options.stage}, mesh {tuple(session.mesh.shape)}, inner {options.inner}"
    lines = [
        head,
        f"accumulate {options.accumulate}, small below {session.least_sharded}",
        f"disabled passes {sorted(options.disable)}, broadcast {options.broadcast_buffers}",
        f"detect_anomaly {options.detect_anomaly}, sequence_parallel {options.sequence_parallel}",
        *passes,
        f"parameters in {options.param_dtype}, reduced in {options.reduce_dtype}",
    ]
    for names, param in plan:
        kind = "" if param.requires_grad else ", frozen"
        kind += ", without values" if param.is_meta and not given else ""
        kind += "" if param.grad is None else ", with a gradient"
        lines.append(f"{names[0]}: {_kind(param)}{kind}")
    lines += [f"buffer {name}: {_kind(buffer)}" for name, buffer in buffers]
    session.journal.compare_plans("\n".join(lines))


def _kind(value: Tensor) -> str:
    return f"{value.dtype}{json.dumps(list(value.shape))}"


def _broadcast_buffers(model: nn.Module, session: Session, *, moves: bool, again: bool) -> None:
    put = {id(buffer): _empty(buffer, session) for buffer in model.buffers() if buffer.is_meta}
    if moves:
        real = (buffer for buffer in model.buffers() if id(buffer) not in put)
        put.update((id(buffer), buffer.to(session.device)) for buffer in real)
    materialise.put_buffers(model, put)
    buffers = list(model.buffers())
    if again:
        buffers = session.buffers.of_all_ranks(buffers, session)
    for buffer in buffers:
        _from_first_rank(buffer, session)
    session.buffers.agree(buffers)


def _empty(value: Tensor, session: Session) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=session.device)


def _shard_parameter(
    old: nn.Parameter,
    names: list[str],
    session: Session,
    rows: Tensor | None,
    dtype: torch.dtype | None,
) -> ParamState:
    domain = session.domain_for(old.shape)
    if rows is None:
        full = _empty(old, session) if old.is_meta else old.detach().to(session.device)
        full = full.clone(memory_format=torch.contiguous_format)
    else:
        full = rows
    if rows is None or not domain.layout.sharded:
        _from_first_rank(full, session)

    def fill(shard: Tensor, resident: Tensor | None) -> None:
        shard.copy_(full if rows is not None else own_rows(full, domain))
        if resident is not None and rows is None:
            resident.copy_(full.reshape(-1))

    tied, trainable = tuple(names[1:]), old.requires_grad
    state = make_state(domain, names[0], tied, old.shape, trainable, fill, full, dtype)
    state.dirty = rows is not None  # a resident copy is gathered by the first forward
    if old.grad is not None:
        state.param.grad = cut(_mean(old.grad, session), state)
    follow_class(old, state.param)
    old_handles.move_attributes(old, state.param)
    return state


def _mean(grad: Tensor, session: Session) -> Tensor:
    """Of the gradients that ranks had before the model was sharded, as of all later ones."""
    comm = session.world
    mean = grad.detach().to(
        session.device, torch.promote_types(grad.dtype, torch.float32), copy=True
    )
    dist.all_reduce(mean, group=comm.group)
    return mean.div_(comm.size).to(grad.dtype)


def _from_first_rank(value: Tensor, session: Session) -> None:
    comm = session.world
    if comm.size > 1 and value.numel():
        broadcast(value, comm.group, comm.ranks[0])


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
