"""What an `Accelerator` or a `Trainer` is asked for that zerofx does itself, or cannot do."""

from __future__ import annotations

from typing import Any

import accelerate
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    DynamoBackend,
)

from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.recipe import Recipe

_KINDS = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def told_by(zero: object) -> tuple[ZeroConfig | None, Recipe | None]:
    """A configuration or a recipe, whichever was given; users may pass anything.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(zero, ZeroConfig):
        return zero, None
    if zero is None or isinstance(zero, Recipe):
        return None, zero
    raise ConfigError(
        f"{zero!r} is neither a configuration nor a recipe",
        'pass zerofx.ZeroConfig(stage=3, …), or zerofx.from_deepspeed("ds_config.json")',
    )


def refuse_rivals(accelerator: accelerate.Accelerator) -> None:
    """Raise a `ConfigError` that names what contradicts zerofx."""
    kind = accelerator.distributed_type
    plugin: Any = accelerator.state.dynamo_plugin
    compiler = plugin.backend
    rivals = [
        (kind not in _KINDS, f"distributed_type={kind}", "leave that plugin out"),
        (
            compiler != DynamoBackend.NO,
            f"dynamo_backend={compiler}",
            "leave it out: prepare compiles with the backend of the config's stage",
        ),
    ]
    for there, what, remedy in rivals:
        if there:
            raise ConfigError(
                f"{what} contradicts zerofx.integrations.Accelerator, which does that itself",
                remedy,
            )
    ways = getattr(accelerator, "parallelism_config", None)  # Accelerate 1.8 has none
    if ways is not None:
        _refuse_ways(ways)
    if accelerator.ddp_handler is not None:
        _refuse_hooks(accelerator.ddp_handler)


def keeps_buffers(accelerator: accelerate.Accelerator) -> bool:
    """Whether DistributedDataParallel would leave each rank its buffers."""
    handler = accelerator.ddp_handler
    return handler is not None and not handler.broadcast_buffers


def refuse_arguments(args: Any) -> None:
    """Raise a `ConfigError` that names an argument of a trainer which contradicts zerofx."""
    rivals = [
        (
            args.deepspeed,
            "deepspeed",
            "take zerofx.integrations.TrainingArguments, which reads the file",
        ),
        (args.fsdp, "fsdp", "leave it out"),
        (args.torch_compile, "torch_compile", "leave it out: zerofx compiles the model"),
        (args.n_gpu > 1, f"n_gpu={args.n_gpu}", "start one process per GPU with torchrun"),
    ]
    for there, name, remedy in rivals:
        if there:
            raise ConfigError(
                f"the training argument {name} contradicts zerofx.integrations.Trainer, which "
                "distributes and compiles the model itself",
                remedy,
            )


def _refuse_ways(config: Any) -> None:
    """Other parallelism than over samples, which Accelerate would deal out to fewer ranks."""
    sequence = "ZeroConfig(sequence_parallel=…) divides sequences"
    remedies = {
        "dp_shard_size": "ZeroConfig(stage=…) shards over all ranks, with replicate=… over some",
        "tp_size": "zerofx.integrations.tensor_parallel divides models, with ZeroConfig(mesh=…), "
        "and so does a file's tensor_parallel.autotp_size: Accelerator(from_deepspeed(…))",
        "cp_size": sequence,
        "sp_size": sequence,
    }
    for name, remedy in remedies.items():
        size = getattr(config, name, 1)  # some versions of Accelerate lack some
        if size > 1:
            raise ConfigError(
                f"ParallelismConfig({name}={size}) has no effect on what zerofx prepares",
                f"leave it out; {remedy}",
            )


def _refuse_hooks(handler: DistributedDataParallelKwargs) -> None:
    """What DistributedDataParallel would do to gradients.

    Its checks and promises, such as `find_unused_parameters`, have nothing to say here.
    """
    other = "use ZeroConfig(reduce_dtype=…), or ZeroConfig(quantize_gradients=…) for fewer bits"
    none = DDPCommunicationHookType.NO
    rivals = {
        "comm_hook": (none, other),
        "comm_wrapper": (none, other),
        "bucket_cap_mb": (25, "use ZeroConfig(bucket_bytes=…)"),
    }
    for name, (default, remedy) in rivals.items():
        value = getattr(handler, name)
        if value != default:
            raise ConfigError(
                f"DistributedDataParallelKwargs({name}={value}): nothing is wrapped in "
                "DistributedDataParallel here",
                f"leave it out; {remedy}",
            )
