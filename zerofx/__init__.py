"""zerofx: ZeRO as a compiler pass behind `torch.compile(model, backend="zero3")`.

Most programs import nothing of this package: the backends `zero` and `zero0` to `zero3` are found
by name. Authors of passes find the vocabulary in `zerofx.passes`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
from zerofx.errors import ZeroFxError
from zerofx.passes.base import Pass
from zerofx.passes.changes import after, before, replace, without
from zerofx.passes.registry import register_pass
from zerofx.sequence.marks import gather_sequence, mark_sequence
from zerofx.torch_private import leave_to_python

if TYPE_CHECKING:
    from zerofx import checkpoint
    from zerofx.debug.explain import explain
    from zerofx.integrations.deepspeed.translate import from_deepspeed

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
    "checkpoint": "zerofx.checkpoint",
    "explain": "zerofx.debug.explain",
    "from_deepspeed": "zerofx.integrations.deepspeed.translate",
}
"""Where names are that few programs need: imported when they are asked for."""

leave_to_python("zerofx.api", "zerofx.runtime", "zerofx.sharding", "zerofx.torch_private")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_HOMES[name])
    return home if home.__name__ == f"{__name__}.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
