"""How the parameters of a plain model would lie on ranks that need not exist."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable

import torch
from torch import nn

from zerofx.config import ZeroConfig
from zerofx.frontend.annotate import owners_in
from zerofx.ir.parcels import Codec
from zerofx.ir.spec import Layout, ParamSpec
from zerofx.passes.quantize import fits, why_exact
from zerofx.runtime.axes import layouts_of, replicas_of
from zerofx.runtime.comm import node_size_of
from zerofx.runtime.secondary import check_nodes
from zerofx.sharding.casts import param_dtypes

_log = logging.getLogger(__name__)

WHOLE, SHARDED = 1, 2
"""Handles of the layouts, which nobody opens."""


def lay_out(
    params: Iterable[ParamSpec], config: ZeroConfig, num_ranks: int, *, codes_are_kept: bool = True
) -> list[ParamSpec]:
    """Parameters as `config` lays them out.

    Args:
        params: of the model.
        config: stage and options.
        num_ranks: W.
        codes_are_kept: with `secondary_shards="codes"`, whether there are any: `quantize="auto"`
            may have found that numbers travel.

    Raises:
        UnsupportedError: the replicas do not divide the ranks, or secondary shards could not serve.
    """
    sharded, whole = _layouts(config, num_ranks)
    params = tuple(params)
    least = config.least_sharded(spec.numel for spec in params)
    laid = [
        dataclasses.replace(
            spec,
            layout=sharded if spec.shape and spec.numel >= least and sharded.sharded else whole,
        )
        for spec in params
    ]
    if not (codes_are_kept and sharded.secondary_codes) or config.weight_codec is None:
        return laid
    codec = Codec.parse(config.weight_codec)
    return [
        dataclasses.replace(spec, secondary_codec=codec.name)
        if not why_exact(spec, [codec], config.quantize_exact)
        else spec
        for spec in laid
    ]


def describe_params(model: nn.Module, cast: torch.dtype | None = None) -> tuple[ParamSpec, ...]:
    """The parameters of a plain model, in registration order.

    Args:
        model: the model.
        cast: what the option `param_dtype` asks for.
    """
    alone = Layout(SHARDED, 2, 1, resident=False)
    owners = owners_in([model])
    dtypes = param_dtypes(model, cast)
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    return tuple(
        ParamSpec(
            names[id(param)][0],
            index,
            param.shape,
            param.dtype,
            param.requires_grad,
            alone,
            tuple(names[id(param)][1:]),
            param_dtype=dtypes[id(param)],
            owners=owners.get(id(param), ()),
        )
        for index, param in enumerate(model.parameters())
    )


def warn_of_idle_patterns(model: nn.Module, config: ZeroConfig) -> None:
    """Say which patterns of `quantize_exact` fit nothing, as one with a slip of the pen would."""
    if config.weight_codec is None and config.gradient_codecs is None:
        return
    names = [name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)]
    names += [owner for owners in owners_in([model]).values() for owner in owners]
    for pattern in config.quantize_exact:
        if pattern not in ZeroConfig.quantize_exact and not fits(pattern, names):
            _log.warning(
                "quantize_exact has the pattern %r, which fits no parameter of %s, and no class "
                "that holds one",
                pattern,
                type(model).__name__,
            )


def buffer_bytes(model: nn.Module) -> int:
    """Memory of all buffers of a model."""
    return sum(buffer.numel() * buffer.dtype.itemsize for buffer in model.buffers())


def _layouts(config: ZeroConfig, num_ranks: int) -> tuple[Layout, Layout]:
    """Of sharded parameters, and of replicated ones."""
    replicas = replicas_of(config, num_ranks)
    shards = num_ranks // replicas if config.stage > 0 else 1
    per_node = config.ranks_per_node or num_ranks
    node_size = node_size_of(range(shards if shards > 1 else num_ranks), per_node)
    check_nodes(config, shards, node_size)
    whole = node_size_of(range(num_ranks), per_node)
    replicas_of_one = node_size_of(range(0, num_ranks, shards), per_node)
    node_sizes = node_size, whole, replicas_of_one
    return layouts_of(config, num_ranks, shards, node_sizes, (SHARDED, WHOLE))
