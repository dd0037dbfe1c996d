"""A `ds_config.json` beside a trainer's arguments: what the file asks for, and where both agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import BATCHING, SAMPLING
from zerofx.integrations.deepspeed.key import IfAuto
from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.torch_private import unwrap_compiled


def auto_values(args: Any, num_training_steps: int | None = None) -> dict[str, Any]:
    """Values for the keys that a `ds_config.json` gives as "auto", out of `TrainingArguments`.

    What the arguments do not ask for, such as fp16, the file may.

    Args:
        args: the arguments.
        num_training_steps: of the run, where `max_steps` is not set: a number of epochs does not
            tell. Without it a schedule's `total_num_steps` stays open, and `warmup_num_steps` if
            it is a share of the run.
    """
    return {
        "train_micro_batch_size_per_gpu": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "gradient_clipping": args.max_grad_norm,
        "dataloader_drop_last": args.dataloader_drop_last,
        "optimizer.params.lr": args.learning_rate,
        "optimizer.params.betas": [args.adam_beta1, args.adam_beta2],
        "optimizer.params.eps": args.adam_epsilon,
        "optimizer.params.weight_decay": args.weight_decay,
        "scheduler.params.warmup_min_lr": IfAuto(0),  # of no argument
        "scheduler.params.warmup_max_lr": args.learning_rate,
        "fp16.enabled": args.fp16 or IfAuto(False),
        "bf16.enabled": args.bf16 or IfAuto(False),
        **_steps(args, num_training_steps),
    }


def _steps(args: Any, num_training_steps: int | None) -> dict[str, Any]:
    """Those of a schedule, as far as they are known; those of epochs only fill in."""
    total, warmup = "scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps"

    def least(steps: int) -> int:
        # Without a warm-up the least that DeepSpeed takes, as in transformers.
        return max(1, args.get_warmup_steps(steps))

    if args.max_steps > 0:
        return {total: args.max_steps, warmup: least(args.max_steps)}
    if num_training_steps is not None:
        return {total: IfAuto(num_training_steps), warmup: IfAuto(least(num_training_steps))}
    share = 0 < args.warmup_steps < 1
    return {} if share else {warmup: IfAuto(least(1))}


def refuse_disagreement(recipe: Recipe, args: Any) -> None:
    """See that what a trainer does by its arguments is what the file says.

    Raises:
        ConfigError: it is not, or the file casts by autocast, which the arguments do; names the
            keys.
    """
    both = {
        "dataloader_drop_last": (recipe.drop_last, args.dataloader_drop_last),
        f"{SAMPLING}.num_workers": (recipe.loader["num_workers"], args.dataloader_num_workers),
        f"{SAMPLING}.pin_memory": (recipe.loader["pin_memory"], args.dataloader_pin_memory),
    }
    refuse_contradictions(
        {
            "train_micro_batch_size_per_gpu": (
                recipe.batch.micro,
                args.per_device_train_batch_size,
            ),
            "gradient_accumulation_steps": (
                recipe.batch.accumulation,
                args.gradient_accumulation_steps,
            ),
            "gradient_clipping": (recipe.gradient_clipping, args.max_grad_norm),
            # What the file does not say, the arguments may.
            **{key: (file or wanted, wanted) for key, (file, wanted) in both.items()},
        },
        "the trainer",
        'write "auto" in the file and pass from_deepspeed(path, auto=auto_values(args))',
    )
    if recipe.sampling is not None and recipe.sampling.scales_rates and recipe.shape is None:
        raise ConfigError(
            f"{BATCHING} scales the learning rates of a schedule, and the file has none",
            'name a scheduler in it, or say "lr_scaling_method": "none"',
        )


def refuse_contradictions(pairs: Mapping[str, tuple[Any, Any]], whom: str, remedy: str) -> None:
    """Raise a `ConfigError` that names the keys whose two values are not the same."""
    against = [
        f"{key}: {file} in the file, {wanted} for {whom}"
        for key, (file, wanted) in pairs.items()
        if file != wanted
    ]
    if against:
        raise ConfigError(f"the file contradicts {whom}", remedy, against)


def layer_of(model: nn.Module, number: int) -> type[nn.Module]:
    """The class of a model's layers, of which there are so many: one that it keeps in one piece.

    Raises:
        ConfigError: it says nothing of the kind, or of several.
    """
    named = getattr(unwrap_compiled(model), "_no_split_modules", None) or ()
    classes = [type(module) for module in model.modules() if type(module).__name__ in named]
    found = {each for each in classes if classes.count(each) == number}
    if len(found) != 1:
        raise ConfigError(
            f"random_ltd has {number} layers, and {type(model).__name__} does not say which of its "
            "modules they are",
            "pass their class: layer=…, to Trainer or Accelerator",
        )
    return found.pop()
