"""From what a file asks for to the options of zerofx."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from zerofx.codegen.blocks import KEPT
from zerofx.config import ZERO_PLUS_PLUS, ZeroConfig, in_own_names, refuse_unknown
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.batch import batch_of
from zerofx.integrations.deepspeed.choices import optimizer_choice, refuse_other_types, shape_choice
from zerofx.integrations.deepspeed.comms import comms_options
from zerofx.integrations.deepspeed.data_keys import SAMPLING
from zerofx.integrations.deepspeed.dtypes import (
    autocast_dtype,
    casts_of,
    computation_dtype,
    reduce_dtype,
)
from zerofx.integrations.deepspeed.flops import flops_options
from zerofx.integrations.deepspeed.monitors import MONITORS
from zerofx.integrations.deepspeed.read import Source, read
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.routing import routing_of
from zerofx.integrations.deepspeed.sampling import sampling_of
from zerofx.integrations.deepspeed.scaling import scaling_of
from zerofx.integrations.deepspeed.settings import Settings, understand
from zerofx.integrations.deepspeed.splitting import sequence_parallel, tensor_parallel
from zerofx.passes.changes import Change, before, replace
from zerofx.passes.fuse_reduces import FuseReduces
from zerofx.passes.fuse_unshards import FuseUnshards
from zerofx.passes.quantize_unshards import QuantizeUnshards
from zerofx.runtime.feedback import RESET_AFTER

_LOCO = {"err_beta": KEPT, "reset_T": RESET_AFTER}


def from_deepspeed(
    source: Source,
    *,
    auto: Mapping[str, Any] | None = None,
    leave_out: Collection[str] = (),
    world_size: int | None = None,
    **options: Any,
) -> Recipe:
    """Read a `ds_config.json` and say what it means here.

    Every key of DeepSpeed is honoured, or has no counterpart that a number could depend on, or is
    refused by name; `print` the result to see which. Keys that the file lacks mean what DeepSpeed
    takes without them where numbers depend on it (clipping, loss scaling, schedules), and zerofx's
    defaults where only speed and memory do.

    Args:
        source: path of the file, which may have comments; or its content.
        auto: values for keys that the file gives as "auto", by path:
            `{"optimizer.params.lr": 3e-5}`. A key that is not "auto" must agree with the file.
        leave_out: paths of keys, or of sections, to train without.
        world_size: number of ranks; by default that of the process group, or of torchrun.
        options: further fields of `ZeroConfig`, which the file does not set.

    Raises:
        ConfigError: the file cannot be read, has unknown keys or values of a wrong type, needs
            `auto`, or its batch sizes do not multiply; or an option is unknown.
        UnsupportedError: it asks for what zerofx does not have; the message lists it all.
    """
    refuse_unknown(options)
    content = read(source)
    leave_out = [leave_out] if isinstance(leave_out, str) else leave_out
    refuse_other_types(content, leave_out)
    settings = understand(content, auto or {}, leave_out)
    ranks = _world_size() if world_size is None else world_size
    batch = batch_of(settings, ranks)
    parts = tensor_parallel(settings)
    ranks //= batch.splitting  # that shard a part of the model
    dtype = computation_dtype(settings)
    itemsize = 4 if dtype is None else dtype.itemsize
    chosen = {
        "stage": settings.get("zero_optimization.stage", 0),
        "accumulate": batch.accumulation,
        "sequence_parallel": sequence_parallel(settings),
        "param_dtype": dtype,
        "reduce_dtype": reduce_dtype(settings),
        **_sizes(settings, itemsize),
        **_switches(settings, ranks),
        **_zero_plus_plus(settings, ranks),
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    twice = sorted(chosen.keys() & options.keys())
    if twice:
        raise ConfigError(
            f"the file sets options {', '.join(twice)} already", "change the file, or leave_out"
        )
    flops = flops_options(settings)
    passes = (
        *_buckets(settings, itemsize),
        *_frozen_codes(settings, options.get("quantize_exact", ZeroConfig().quantize_exact)),
        *options.pop("passes", ()),
        *(() if flops is None else (flops.counter,)),
    )
    return Recipe(
        chosen=ZeroConfig(**chosen, **options, passes=passes),
        batch=batch,
        optimizer=optimizer_choice(settings),
        shape=shape_choice(settings),
        last_step=settings.get("scheduler.params.last_batch_iteration", -1),
        scaling=scaling_of(settings, dtype),
        casts=casts_of(settings, dtype),
        autocast_dtype=autocast_dtype(settings),
        sums_gradients=_sums_gradients(settings),
        gradient_clipping=float(settings.get("gradient_clipping", 1.0)),
        steps_per_print=settings.get("steps_per_print", 0),
        wall_clock_breakdown=settings.get("wall_clock_breakdown", False),
        memory_breakdown=settings.get("memory_breakdown", False),
        flops=flops,
        comms=comms_options(settings),
        monitors={
            name: settings.section(name)
            for name in MONITORS
            if settings.get(f"{name}.enabled", False)
        },
        dump_state=settings.get("dump_state", False),
        gathers_on_save=_gathers_on_save(settings),
        node_local=settings.get("checkpoint.use_node_local_storage", False),
        drop_last=settings.get("dataloader_drop_last", False),
        sampling=sampling_of(settings),
        loader={
            name: settings.get(f"{SAMPLING}.{name}", default)
            for name, default in (("num_workers", 0), ("pin_memory", False))
        },
        routing=routing_of(settings),
        allows_unused=settings.get("zero_optimization.ignore_unused_parameters", True),
        tensor_parallel=parts,
        rows=settings.rows,
    )


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _sums_gradients(settings: Settings) -> bool:
    op: str = settings.get("gradient_allreduce_op", "mean")
    if op.lower() not in ("mean", "sum"):
        raise ConfigError(f"gradient_allreduce_op is {op!r}", 'use "mean" or "sum"')
    return op.lower() == "sum"


def _buckets(settings: Settings, itemsize: int) -> tuple[Change, ...]:
    """Gathers and reductions may have buckets of different sizes: each pass gets its own."""
    zero = settings.section("zero_optimization")
    gathers = zero.get("stage3_prefetch_bucket_size", zero.get("allgather_bucket_size"))
    reductions = zero.get("reduce_bucket_size")
    changes: list[Change] = []
    if gathers is not None:
        changes.append(replace("fuse_unshards", FuseUnshards(target_bytes=gathers * itemsize)))
    if reductions is not None:
        changes.append(replace("fuse_reduces", FuseReduces(target_bytes=reductions * itemsize)))
    return tuple(changes)


def _sizes(settings: Settings, itemsize: int) -> dict[str, int | None]:
    """Options made of numbers of elements."""
    zero = settings.section("zero_optimization")
    live, reuse = zero.get("stage3_max_live_parameters"), zero.get("stage3_max_reuse_distance")
    small = zero.get("stage3_param_persistence_threshold")
    bound = zero.get("stage3_model_persistence_threshold")
    return {
        "prefetch_bytes": None if live is None else live * itemsize,
        # From its last use in forward to its first in backward lies twice what comes after it.
        "memory_budget": None if reuse is None else reuse // 2 * itemsize,
        # DeepSpeed keeps parameters up to the threshold, this option those below it.
        "min_shard_numel": None if small is None else small + 1,
        "max_replicated_numel": bound,
    }


def _switches(settings: Settings, ranks: int) -> dict[str, Any]:
    group = settings.get("zero_optimization.mics_shard_size", -1)
    if not isinstance(group, int) or (group > 0 and ranks % group):
        raise ConfigError(
            f"mics_shard_size {group!r} does not divide {ranks} ranks", "use a divisor of the ranks"
        )
    overlaps = settings.get("zero_optimization.overlap_comm", True)
    return {
        "disable": None if overlaps else ("schedule",),
        "replicate": ranks // group if group > 0 else None,
        "cast_forward_inputs": settings.get("fp16.auto_cast"),
    }


def _zero_plus_plus(settings: Settings, ranks: int) -> dict[str, Any]:
    zero = settings.section("zero_optimization")
    node = zero.get("zero_hpz_partition_size", 1)
    if node > 1 and ranks % node:
        raise ConfigError(
            f"zero_hpz_partition_size {node} does not divide {ranks} ranks",
            "use the number of ranks on a node",
        )
    given = {name: zero[name] for name in ZERO_PLUS_PLUS if name in zero}
    if node >= ranks:
        given.pop("zero_hpz_partition_size", None)
    return in_own_names(given) | _feedback(zero)


def _feedback(zero: Mapping[str, Any]) -> dict[str, Any]:
    given = zero.get("zeropp_loco_param")
    if given is None or not zero.get("zero_quantized_gradients"):
        return {}
    if not isinstance(given, Mapping) or not given.items() <= _LOCO.items():
        raise ConfigError(
            f"zero_optimization.zeropp_loco_param is {given!r}",
            f"write {_LOCO}: feedback has no other settings",
        )
    return {"quantize_gradients": "int4.feedback"}


def _frozen_codes(settings: Settings, exact: Sequence[str]) -> tuple[Change, ...]:
    """Frozen weights alone as codes; with the key for all weights they are anyway."""
    zero = settings.section("zero_optimization")
    if not zero.get("zero_quantized_nontrainable_weights") or zero.get("zero_quantized_weights"):
        return ()
    return (before("fuse_unshards", QuantizeUnshards(exact=tuple(exact), frozen_only=True)),)


def _gathers_on_save(settings: Settings) -> bool:
    names = (
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    )
    return any(settings.get(f"zero_optimization.{name}", False) for name in names)
