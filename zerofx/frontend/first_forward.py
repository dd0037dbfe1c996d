"""Models are sharded before their first compiled forward, so that no part of it escapes.

Dynamo gives up a frame with a graph break in a loop, or that calls `nn.LSTM`: Python runs it, and
what it computes with modules of torch's own reaches no backend. There sharded parameters are read
one by one; plain ones would train apart on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.config import Stage, ZeroConfig, config_from_options
from zerofx.errors import ShardingError, ZeroFxError
from zerofx.frontend.inner import patches_of_mode
from zerofx.frontend.layouts import warn_of_idle_patterns
from zerofx.frontend.roots import (
    find_compiled_module,
    find_missing_roots,
    find_root,
    refuse_late_casts,
)
from zerofx.option_checks import refuse_at_stage
from zerofx.passes.fingerprint import fingerprint
from zerofx.passes.pipelines import pipeline
from zerofx.passes.registry import with_registered
from zerofx.runtime.gradients import take_narrow_gradients
from zerofx.runtime.handles import live_sessions
from zerofx.runtime.session import Session
from zerofx.sharding.assignments import follow_model
from zerofx.sharding.refuse import refuse_meta
from zerofx.sharding.shard import MakeValues, session_of, shard_model
from zerofx.torch_private import (
    before_forwards,
    inside_transform,
    mix_while_tracing,
    pass_through_dynamo,
)


def install(backends: Mapping[Stage, Any], chooser: Any) -> None:
    """From now on, for these backends, and the one that chooses a stage."""
    apart: list[tuple[Tensor, Tensor]] = []  # parameters that are traced, and their gradients

    def hear(backend: Any, given: Mapping[str, Any], compiled: nn.Module | None) -> bool:
        stages: list[Stage] = [stage for stage, ours in backends.items() if ours is backend]
        try:
            if backend is chooser:  # it shards in the first forward
                done = compiled is not None and session_of(compiled) is not None
            else:
                module = find_compiled_module() if compiled is None else compiled
                done = not stages or _shard_first(stages[0], module, given)
        except ZeroFxError as error:
            pass_through_dynamo(error)
            raise
        if compiled is None and (stages or backend is chooser):
            # `p + noise` for a `p` of `self.parameters()`: `read_whole` makes both full values.
            mix_while_tracing()
            for session in live_sessions():
                apart.extend(take_narrow_gradients(session.states))
        return done

    def compiled() -> None:
        for param, grad in apart:
            param.grad = grad
        apart.clear()

    before_forwards(hear, _begins, compiled)


def _shard_first(stage: Stage, compiled: nn.Module | None, given: Mapping[str, Any]) -> bool:
    """Whether the module is sharded now."""
    if compiled is None or given.keys() - {"options", "mode"}:
        return False  # the backend refuses it
    params = list(compiled.parameters())
    if any(isinstance(param, DTensor) for param in params):
        return True
    if not params or inside_transform() or not all(map(_is_ready, params)):
        return False
    try:
        root = find_root((), compiled)
    except ShardingError:  # the backend raises it if the graph reads plain parameters
        return False
    refuse_meta(root)
    config = config_of(stage, given.get("options"))
    patches_of_mode(given.get("mode"), config)  # it is refused here, while the model is plain
    shard_root(root, config)
    return True


def _begins(module: nn.Module) -> bool:
    """A forward of a compiled module begins; whether it is a model of its own."""
    session = _session_begun(module)
    if session is None:
        return False
    if session.may_grow and not inside_transform():
        _shard_new(module, session)
    if session.config.broadcast_buffers:
        session.buffers.forward_begins(session, trains=torch.is_grad_enabled())
    return True


def _session_begun(module: nn.Module) -> Session | None:
    for session in live_sessions():
        if session.root() is module:
            return session
    session = session_of(module)
    if session is not None and session.root() is None:
        find_missing_roots([session])  # a deep copy's first forward
        return session if session.root() is module else None
    return None


def _shard_new(root: nn.Module, session: Session) -> None:
    """Shard what a model got since its last forward, and forget what it lost.

    A part that Python runs would not see it.
    """
    plain = [param for param in root.parameters() if not isinstance(param, DTensor)]
    session.may_grow = not all(map(_is_ready, plain))
    if plain and not session.may_grow:
        shard_root(root, session.config)
    else:
        follow_model(session)


def _is_ready(param: Tensor) -> bool:
    # `functional_call` puts other tensors in the place of parameters.
    return isinstance(param, nn.Parameter) and not nn.parameter.is_lazy(param)


def config_of(stage: Stage, options: Mapping[str, Any] | None) -> ZeroConfig:
    """What a user chose at a fixed stage."""
    config = with_registered(config_from_options(stage, options))
    refuse_at_stage(config)
    return config


def shard_root(root: nn.Module, config: ZeroConfig) -> None:
    """Shard a plain model, or what was added to one that is sharded."""
    session = session_of(root)
    known = session.root() if session is not None else None
    if session is None or (known is not None and root not in known.modules()):
        refuse_late_casts(root, config)  # its border is not that of what was sharded
    shard_for_passes(root, config)


def shard_for_passes(model: nn.Module, config: ZeroConfig, **how: MakeValues) -> Session:
    """Shard for the pipeline of `config`; the first rank says which patterns fit nothing."""
    session = shard_model(model, config, fingerprint(pipeline(config)), **how)
    if session.world.rank == 0:
        warn_of_idle_patterns(session.root() or model, config)
    return session
