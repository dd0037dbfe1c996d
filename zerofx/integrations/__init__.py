"""Programs of other libraries: loops and adapters of Hugging Face; Lightning; files of DeepSpeed.

The libraries are optional (`pip install 'zerofx[hf]'`, `'zerofx[lightning]'`), and imported when a
name is asked for. Modules: accelerator, recipe_accelerator, rivals, samples, stepping, trainer,
arguments, adapters, target_parameters, embeddings, recipe, reports, lightning. Packages: deepspeed,
tensor_parallel.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from zerofx.errors import MissingPackageError

if TYPE_CHECKING:
    from zerofx.integrations.accelerator import Accelerator
    from zerofx.integrations.adapters import save_adapters
    from zerofx.integrations.arguments import TrainingArguments
    from zerofx.integrations.embeddings import resize_token_embeddings
    from zerofx.integrations.lightning import ZeroStrategy
    from zerofx.integrations.recipe import auto_values
    from zerofx.integrations.target_parameters import trace_target_parameters
    from zerofx.integrations.trainer import Trainer, TrainerMixin

__all__ = [
    "Accelerator",
    "Trainer",
    "TrainerMixin",
    "TrainingArguments",
    "ZeroStrategy",
    "auto_values",
    "resize_token_embeddings",
    "save_adapters",
    "trace_target_parameters",
]

_HOMES = {
    "Accelerator": ("accelerator", "hf", ("accelerate",)),
    "Trainer": ("trainer", "hf", ("accelerate", "transformers")),
    "TrainerMixin": ("trainer", "hf", ("accelerate", "transformers")),
    "TrainingArguments": ("arguments", "hf", ("accelerate", "transformers")),
    "ZeroStrategy": ("lightning", "lightning", ("lightning",)),
    "auto_values": ("recipe", "", ()),
    "resize_token_embeddings": ("embeddings", "", ()),
    "save_adapters": ("adapters", "hf", ("peft",)),
    "trace_target_parameters": ("target_parameters", "hf", ("peft",)),
}
"""By name: its module, the extra that brings what that needs, and the packages."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra, packages = _HOMES[name]
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(
                f"zerofx.integrations.{name} needs the package {package}, which is not installed",
                f"pip install 'zerofx[{extra}]'",
            )
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
