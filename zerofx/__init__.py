"""zerofx: ZeRO as a compiler pass behind `torch.compile(model, backend="zero3")`.

Most programs import nothing of this package: the backends `zero` and `zero0` to `zero3` are found
by name. Authors of passes find the vocabulary in `zerofx.passes`.

Names are imported when they are asked for: most of them need torch's compilers, which take seconds.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofx import checkpoint
    from zerofx.api import (
        GradScaler,
        OwnerOptimizer,
        drift,
        load_safetensors,
        meta_init,
        no_sync,
        refresh,
        shard,
        trust,
        unshard,
    )
    from zerofx.config import ZeroConfig
    from zerofx.debug.explain import explain
    from zerofx.errors import ZeroFxError
    from zerofx.integrations.deepspeed.translate import from_deepspeed
    from zerofx.passes.base import Pass
    from zerofx.passes.changes import after, before, replace, without
    from zerofx.passes.registry import register_pass
    from zerofx.sequence.marks import gather_sequence, mark_sequence

__all__ = [
    "GradScaler",
    "OwnerOptimizer",
    "Pass",
    "ZeroConfig",
    "ZeroFxError",
    "after",
    "before",
    "checkpoint",
    "drift",
    "explain",
    "from_deepspeed",
    "gather_sequence",
    "load_safetensors",
    "mark_sequence",
    "meta_init",
    "no_sync",
    "refresh",
    "register_pass",
    "replace",
    "shard",
    "trust",
    "unshard",
    "without",
]

_HOMES = {
    "ZeroConfig": "config",
    "ZeroFxError": "errors",
    "explain": "debug.explain",
    "from_deepspeed": "integrations.deepspeed.translate",
    "Pass": "passes.base",
    **dict.fromkeys(("after", "before", "replace", "without"), "passes.changes"),
    "register_pass": "passes.registry",
    **dict.fromkeys(("gather_sequence", "mark_sequence"), "sequence.marks"),
}
"""Modules of names that are neither modules themselves nor in `zerofx.api`."""


def __getattr__(name: str) -> Any:
    if not name.startswith("__") and find_spec(f"zerofx.{name}"):
        found = importlib.import_module(f"zerofx.{name}")
    elif name in __all__:
        found = getattr(importlib.import_module(f"zerofx.{_HOMES.get(name, 'api')}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
