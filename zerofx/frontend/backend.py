"""The backends `zero`, and `zero0` to `zero3`, that `torch.compile` finds by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

import zerofx.runtime.markers  # noqa: F401 (registers the eager kernels)
from zerofx.config import Stage, ZeroConfig, config_from_options, differences
from zerofx.errors import ConfigError, ShardingError, UnsupportedError, ZeroFxError
from zerofx.frontend import first_forward, step_guard
from zerofx.frontend.annotate import GraphInputs, describe_inputs
from zerofx.frontend.capture import Capture
from zerofx.frontend.choose import choose_stage
from zerofx.frontend.first_forward import config_of, shard_root
from zerofx.frontend.inner import SegmentCompiler, patches_of_mode
from zerofx.frontend.roots import (
    find_compiled_module,
    find_missing_roots,
    find_root,
    refuse_running_wrappers,
    to_be_sharded,
)
from zerofx.frontend.watch import GraphWatcher, watcher_of
from zerofx.option_checks import at_stage
from zerofx.passes.registry import refuse_changed, registered, with_registered
from zerofx.runtime.handles import live_sessions
from zerofx.runtime.session import Session
from zerofx.sharding import assignments
from zerofx.sharding.refuse import refuse_meta
from zerofx.sharding.shard import session_of
from zerofx.torch_private import (
    leave_to_python,
    mix_while_tracing,
    pass_through_dynamo,
    recompile_limit,
    restart_dynamo,
    stop_mixing,
)

step_guard.install()
assignments.install()
leave_to_python("zerofx.runtime", "zerofx.sharding", "zerofx.torch_private")

Compiled = Callable[..., Any]


def zero(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """The lowest stage that fits the ranks' memory, by the plan of this model and its first batch.

    The choice is made once, when the model is sharded; see `zerofx.frontend.choose`.
    """
    return _compile(None, module, inputs, **kwargs)


def zero0(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """Plain data parallelism: everything replicated, gradients all-reduced."""
    return _compile(0, module, inputs, **kwargs)


def zero1(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """ZeRO stage 1: optimizer state and master weights sharded."""
    return _compile(1, module, inputs, **kwargs)


def zero2(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """ZeRO stage 2: stage 1, and gradients sharded as soon as they exist."""
    return _compile(2, module, inputs, **kwargs)


def zero3(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Compiled:
    """ZeRO stage 3: stage 2, and parameters sharded between uses."""
    return _compile(3, module, inputs, **kwargs)


_BACKENDS: dict[Stage, Any] = {0: zero0, 1: zero1, 2: zero2, 3: zero3}
first_forward.install(_BACKENDS, zero)


def _compile(
    stage: Stage | None,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
    **others: Any,
) -> Compiled:
    """Shard on first sight, then compile.

    Args:
        stage: ZeRO stage; `None`: to be chosen.
        module: Dynamo's graph.
        inputs: its real inputs, parameters included.
        options: fields of `ZeroConfig`, or `config`: one.
        mode: as for Inductor; only modes without CUDA graphs.
        others: what newer versions of `torch.compile` pass on, such as `name`.

    Raises:
        ZeroFxError: something is refused; the message names it and the remedy.
    """
    stop_mixing()
    try:
        if others:
            given = ", ".join(f"{name}={value!r}" for name, value in others.items())
            raise UnsupportedError(f"torch.compile was given {given}", "leave it out")
        return _shard_and_compile(stage, module, inputs, options, mode)
    except ZeroFxError as error:
        pass_through_dynamo(error)
        raise


def _shard_and_compile(
    stage: Stage | None,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
) -> Compiled:
    refuse_running_wrappers()
    plain = to_be_sharded(inputs)
    root = find_root(plain) if plain else None
    if root is not None:
        refuse_meta(root)
    if stage is None:
        stage = _stage_for(module, inputs, root, options)
        config = with_registered(config_from_options(stage, _options_at(stage, options)))
    else:
        session = session_of(root) if root is not None else _running_session()
        config = _as_sharded(session, stage, options) or config_of(stage, options)
    patches_of_mode(mode, config)  # it is refused here, while the model is plain
    if root is not None:
        shard_root(root, config)
        mix_while_tracing()
        restart_dynamo()
    find_missing_roots(live_sessions())
    described = describe_inputs(module.graph, inputs)
    if (given := _as_sharded(described.session, stage, options)) is not None:
        config = given
    compiler = SegmentCompiler(config.inner, patches_of_mode(mode, config))
    _check_options(described, config)
    for session in described.sessions:
        session.recompile_limit = recompile_limit()
    if not config.dump and described.session is not None:
        asked = described.session.config
        config = dataclasses.replace(config, dump=asked.dump, measure=asked.measure)
    watcher = watcher_of(module, described.session)
    compiled = Capture(config, described, compiler, watcher=watcher).compile(module, inputs)
    if watcher is not None:
        compiled = _told(compiled, watcher)
    return _with_same_passes(compiled) if described.session is not None else compiled


def _running_session() -> Session | None:
    """Of the model that is compiled: what comes before its first layer reads no parameter."""
    module = find_compiled_module()
    try:
        return None if module is None else session_of(module)
    except ShardingError:  # its parts are models of their own
        return None


def _as_sharded(
    session: Session | None, stage: Stage, options: Mapping[str, Any] | None
) -> ZeroConfig | None:
    """The options of `zerofx.shard`, which hold wherever the model is compiled without others."""
    if session is None or options:
        return None
    return with_registered(dataclasses.replace(session.config, stage=stage))


def _told(compiled: Compiled, watcher: GraphWatcher) -> Compiled:
    def run(*args: Any) -> Any:
        watcher.ran()
        return compiled(*args)

    return run


def _with_same_passes(compiled: Compiled) -> Compiled:
    """Dynamo reuses a program without asking which passes are registered: the program asks."""
    then = registered()

    def run(*args: Any) -> Any:
        refuse_changed(then)
        return compiled(*args)

    return run


def _stage_for(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    root: nn.Module | None,
    options: Mapping[str, Any] | None,
) -> Stage:
    """The stage that the model has or, if it is plain, will have."""
    session = describe_inputs(module.graph, inputs).session if root is None else session_of(root)
    if session is not None:
        return session.config.stage
    if root is None:
        return 0  # nothing to shard
    given = config_from_options(3, _options_at(3, options))
    plain = at_stage(given, 0)
    for name in ("secondary_shards", "quantize", "quantize_weights", "quantize_gradients"):
        if getattr(plain, name) != getattr(given, name):
            raise ConfigError(
                f"option {name}={getattr(given, name)!r} has a meaning at some stages only, and "
                'backend="zero" chooses the stage',
                'use backend="zero3"; `zerofx plan` says what fits',
            )
    return choose_stage(module, inputs, root, given)


def _options_at(stage: Stage, options: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """The options with a whole configuration, if there is one, at this stage."""
    if not isinstance(options, Mapping) or not isinstance(options.get("config"), ZeroConfig):
        return options  # those of other types are refused where they are read
    return {**options, "config": dataclasses.replace(options["config"], stage=stage)}


def _check_options(described: GraphInputs, config: ZeroConfig) -> None:
    for session in described.sessions:
        if session.config != config:
            raise UnsupportedError(
                "the model was sharded with other options than it is compiled with",
                "use the same backend, options and registered passes in zerofx.shard and wherever "
                "you compile it",
                differences(session.config, config),
            )
        if config.hang_timeout not in (session.config.hang_timeout, ZeroConfig.hang_timeout):
            raise UnsupportedError(
                f"hang_timeout={config.hang_timeout:g} comes too late: ranks watch each other "
                f"since the model was sharded, with {session.config.hang_timeout:g}",
                "give it to zerofx.shard, or where the model is compiled first",
            )
