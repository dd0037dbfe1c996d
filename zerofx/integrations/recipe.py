"""A `ds_config.json` beside a trainer's arguments: what the file asks for, and where both agree."""

from __future__ import annotations

import dataclasses
from typing import Any

from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.recipe import Recipe


def auto_values(args: Any) -> dict[str, Any]:
    """Values for the keys that a `ds_config.json` gives as "auto", out of `TrainingArguments`.

    The schedule's steps are among them if `max_steps` is set; a number of epochs does not tell.
    """
    steps = {
        "scheduler.params.total_num_steps": args.max_steps,
        "scheduler.params.warmup_num_steps": args.get_warmup_steps(args.max_steps),
    }
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "dataloader_drop_last": args.dataloader_drop_last,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": args.fp16,
        "bf16.enabled": args.bf16,
        **(steps if args.max_steps > 0 else {}),
    }


def agreed_config(recipe: Recipe, args: Any) -> ZeroConfig:
    """The options of the file, once its sizes are seen to be those of the arguments.

    Raises:
        ConfigError: they are not, or the file casts by autocast, which the arguments do; names the
            keys.
    """
    drops_last = args.dataloader_drop_last
    pairs = {
        "train_micro_batch_size_per_gpu": (recipe.batch.micro, args.per_device_train_batch_size),
        "gradient_accumulation_steps": (
            recipe.batch.accumulation,
            args.gradient_accumulation_steps,
        ),
        "gradient_clipping": (recipe.gradient_clipping, args.max_grad_norm),
        "torch_autocast": (recipe.autocast_dtype, None),
        "sequence_parallel_size": (recipe.batch.sharing, 1),
        "tensor_parallel.autotp_size": (recipe.batch.splitting, 1),
        "gradient_allreduce_op": ("sum" if recipe.sums_gradients else "mean", "mean"),
        "data_efficiency": ("enabled" if recipe.sampling or recipe.routing else "off", "off"),
        "dataloader_drop_last": (drops_last or recipe.drop_last, drops_last),
        "checkpoint.use_node_local_storage": (recipe.node_local, False),
    }
    against = [
        f"{key}: {file} in the file, {wanted} for the trainer"
        for key, (file, wanted) in pairs.items()
        if file != wanted
    ]
    if against:
        raise ConfigError(
            "the file contradicts the trainer's arguments",
            'write "auto" in the file and pass from_deepspeed(path, auto=auto_values(args)); say '
            "bf16 or fp16 in the file instead of autocast",
            against,
        )
    return dataclasses.replace(recipe.config, accumulate=1)  # the trainer counts
