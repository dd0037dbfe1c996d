"""The backends `zero0` to `zero3` that `torch.compile` finds by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch.distributed.tensor import DTensor

import zerofx.runtime.markers  # noqa: F401 (registers the eager kernels)
from zerofx.config import Stage, ZeroConfig, config_from_options
from zerofx.errors import UnsupportedError, ZeroFxError
from zerofx.frontend import step_guard
from zerofx.frontend.annotate import GraphInputs, describe_inputs
from zerofx.frontend.capture import Capture
from zerofx.frontend.inner import SegmentCompiler
from zerofx.frontend.roots import (
    find_missing_roots,
    find_root,
    refuse_late_casts,
    refuse_running_wrappers,
)
from zerofx.runtime.handles import live_sessions
from zerofx.sharding import assignments
from zerofx.sharding.shard import session_of, shard_model
from zerofx.torch_private import inductor_options_of_mode, pass_through_dynamo, restart_dynamo

step_guard.install()
assignments.install()

Compiled = Callable[..., Any]


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


def _compile(
    stage: Stage,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Shard on first sight, then compile.

    Args:
        stage: ZeRO stage.
        module: Dynamo's graph.
        inputs: its real inputs, parameters included.
        options: fields of `ZeroConfig`, or `config`: one.
        mode: as for Inductor; only modes without CUDA graphs.

    Raises:
        ZeroFxError: something is refused; the message names it and the remedy.
    """
    try:
        return _shard_and_compile(stage, module, inputs, options, mode)
    except ZeroFxError as error:
        pass_through_dynamo(error)
        raise


def _shard_and_compile(
    stage: Stage,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: Mapping[str, Any] | None,
    mode: str | None,
) -> Compiled:
    config = config_from_options(stage, options)
    compiler = SegmentCompiler(config.inner, _patches(config, mode))
    refuse_running_wrappers()
    plain = [v for v in inputs if isinstance(v, nn.Parameter) and not isinstance(v, DTensor)]
    if plain:
        root = find_root(plain)
        if session_of(root) is None:
            refuse_late_casts(root, config)
        shard_model(root, config)
        restart_dynamo()
    find_missing_roots(live_sessions())
    described = describe_inputs(inputs)
    if described.session is not None and not options:
        # Sharded by zerofx.shard, whose options hold wherever the model is compiled.
        config = dataclasses.replace(described.session.config, stage=stage)
        compiler = SegmentCompiler(config.inner, _patches(config, mode))
    _check_options(described, config)
    return Capture(config, described, compiler).compile(module, inputs)


def _check_options(described: GraphInputs, config: ZeroConfig) -> None:
    for session in described.sessions:
        if session.config != config:
            raise UnsupportedError(
                f"the model was sharded with {session.config}, and is compiled with {config}",
                "use the same backend and options in zerofx.shard and wherever you compile it",
            )


def _patches(config: ZeroConfig, mode: str | None) -> dict[str, Any]:
    if mode in (None, "default"):
        return {}
    if config.inner == "eager":
        raise UnsupportedError(f'mode="{mode}" has no meaning with inner="eager"', "leave one out")
    patches = inductor_options_of_mode(mode)
    if patches.get("triton.cudagraphs"):
        raise UnsupportedError(
            f'mode="{mode}" records CUDA graphs, which cannot hold collectives that run between '
            "segments",
            'use mode="max-autotune-no-cudagraphs" or no mode',
        )
    return patches
