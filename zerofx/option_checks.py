"""What options may be, each by itself and together."""

# Users may pass anything, whatever the annotations say.
# pyright: reportUnnecessaryIsInstance=false

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import ConfigError

if TYPE_CHECKING:
    from zerofx.config import ZeroConfig

_FLOATS = "None or a floating-point torch.dtype of at least 16 bits, such as torch.bfloat16"
_COUNTS = ("replicate", "sequence_parallel", "accumulate")
_SIZES = (
    "max_replicated_numel",
    "bucket_bytes",
    "memory_budget",
    "prefetch_bytes",
    "device_memory",
    "measure",
)
_DTYPES = ("param_dtype", "reduce_dtype", "output_dtype")
_SWITCHES = (
    "broadcast_buffers",
    "cast_forward_inputs",
    "keep_freed_memory",
    "verify",
    "detect_anomaly",
)


def refuse_wrong_values(config: ZeroConfig) -> None:
    """Look at each option by itself.

    Raises:
        ConfigError: names the option and what it may be.
    """
    value = functools.partial(getattr, config)
    checks: list[tuple[bool, str, str]] = [
        (_is_count(config.stage, 0) and config.stage < 4, "stage", "0, 1, 2 or 3"),
        (config.inner in ("inductor", "eager"), "inner", '"inductor" or "eager"'),
        *((_is_count(value(name), 1), name, "an integer of at least 1") for name in _COUNTS),
        (_is_count(config.min_shard_numel, 0), "min_shard_numel", "an integer of at least 0"),
        (_is_size(config.ranks_per_node, 1), "ranks_per_node", "None or an integer of at least 1"),
        (_is_size(config.drift_every, 1), "drift_every", "None or an integer of at least 1"),
        *((_is_size(value(name), 0), name, "None or an integer of at least 0") for name in _SIZES),
        *((_is_float(value(name)), name, _FLOATS) for name in _DTYPES),
        (
            _is_float(config.grad_dtype) and config.grad_dtype is not torch.float16,
            "grad_dtype",
            "None, torch.bfloat16, or a wider dtype: torch.amp.GradScaler takes no fp16 gradients",
        ),
        (config.quantize in (None, "auto"), "quantize", 'None or "auto"'),
        (
            isinstance(config.secondary_shards, bool) or config.secondary_shards == "codes",
            "secondary_shards",
            'False, True or "codes" (those of quantize_weights)',
        ),
        (
            isinstance(config.quantize_weights, (str, type(None))),
            "quantize_weights",
            'None or a codec, such as "int8"',
        ),
        (
            config.quantize_gradients is None or _are_texts(config.gradient_codecs, num=2),
            "quantize_gradients",
            'None, a codec such as "int8", or two of them',
        ),
        (
            _are_texts(config.quantize_exact),
            "quantize_exact",
            'patterns of names, such as ("*embed*",)',
        ),
        (_is_duration(config.hang_timeout), "hang_timeout", "a finite number of seconds above 0"),
        (isinstance(config.dump, str), "dump", "the path of a folder, or an empty string"),
        (_are_texts(config.disable), "disable", 'names of passes, such as ("schedule",)'),
        (isinstance(config.passes, tuple), "passes", "a list of passes and changes"),
        (isinstance(config.mesh, (DeviceMesh, type(None))), "mesh", "None or a DeviceMesh"),
        *((isinstance(value(name), bool), name, "True or False") for name in _SWITCHES),
    ]
    for good, name, wanted in checks:
        if not good:
            raise ConfigError(f"option {name}={value(name)!r} is not allowed", f"use {wanted}")


def refuse_contradictions(config: ZeroConfig) -> None:
    """Look at options that exclude or need one another.

    Raises:
        ConfigError: names them.
    """
    if config.drift_every is not None and config.weight_codec is config.gradient_codecs is None:
        raise ConfigError(
            "option drift_every has no meaning where nothing is quantized",
            "give quantize_weights or quantize_gradients, or leave it out",
        )
    if config.measure is not None and not config.dump:
        raise ConfigError("option measure has no meaning without a dump", "give dump=folder too")
    if config.mesh is not None and config.replicate != 1:
        raise ConfigError(
            "options mesh and replicate contradict each other",
            "give the 2-D mesh (replicate, shard) alone, or replicate=k alone",
        )
    if config.secondary_shards == "codes" and config.weight_codec is None and config.stage == 3:
        raise ConfigError(
            'option secondary_shards="codes" has no meaning where gathers send numbers',
            'set quantize_weights="int8" too, or use secondary_shards=True',
        )
    if config.secondary_shards and config.stage != 3:
        raise ConfigError(
            f"option secondary_shards={config.secondary_shards!r} has no meaning at stage "
            f"{config.stage}, where parameters are not sharded between forward and backward",
            'use backend="zero3", or leave secondary_shards out',
        )
    if config.mesh is not None and config.mesh.ndim not in (1, 2):
        raise ConfigError(
            f"option mesh has {config.mesh.ndim} axes",
            "use a 1-D mesh (shard,) or a 2-D mesh (replicate, shard)",
        )


def refuse_at_stage(config: ZeroConfig) -> None:
    """Look at options that have no meaning at a stage which the user gave.

    Raises:
        ConfigError: names them.
    """
    if config.device_memory is not None:
        raise ConfigError(
            f"option device_memory has no meaning where the stage is given, here {config.stage}",
            'use backend="zero", which chooses the stage by it, or leave it out; stage 3 takes '
            "memory_budget and prefetch_bytes",
        )
    for name in ("memory_budget", "prefetch_bytes"):
        if config.stage < 3 and getattr(config, name) is not None:
            raise ConfigError(
                f"option {name} has no meaning at stage {config.stage}, where full values stay",
                f'use backend="zero3", or leave {name} out',
            )


def at_stage(config: ZeroConfig, stage: int) -> ZeroConfig:
    """The options at another stage, without those that have no meaning there."""
    without: dict[str, Any] = {}
    if stage < 3:
        without = {"secondary_shards": False, "quantize_weights": None}
        without |= {"memory_budget": None, "prefetch_bytes": None}
    if stage == 0 or (config.quantize_weights and not config.quantize_gradients and stage < 3):
        without |= {"quantize": None, "quantize_gradients": None, "drift_every": None}
    return dataclasses.replace(config, stage=stage, **without)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _are_texts(value: object, num: int | None = None) -> bool:
    """Whether it is a tuple of strings, `num` of them; a string counts as a tuple of itself."""
    texts = cast("tuple[Any, ...]", (value,) if isinstance(value, str) else value)
    are = isinstance(texts, tuple) and all(isinstance(each, str) for each in texts)
    return are and num in (None, len(texts))


def _is_float(value: torch.dtype | None) -> bool:
    if value is None:
        return True
    return isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize > 1


def _is_size(value: object, least: int) -> bool:
    return value is None or _is_count(value, least)


def _is_duration(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 < value <= threading.TIMEOUT_MAX
