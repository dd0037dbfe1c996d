"""zerofx: ZeRO as a compiler pass behind `torch.compile(model, backend="zero3")`.

Most programs import nothing of this package: the backends `zero` and `zero0` to `zero3` are found
by name. Authors of passes find the vocabulary in `zerofx.passes`.
"""

from zerofx.api import (
    GradScaler,
    drift,
    explain,
    from_deepspeed,
    load_safetensors,
    meta_init,
    no_sync,
    refresh,
    shard,
    unshard,
)
from zerofx.config import ZeroConfig
from zerofx.errors import ZeroFxError
from zerofx.passes.base import Pass
from zerofx.passes.changes import after, before, replace, without
from zerofx.passes.registry import register_pass

__all__ = [
    "GradScaler",
    "Pass",
    "ZeroConfig",
    "ZeroFxError",
    "after",
    "before",
    "drift",
    "explain",
    "from_deepspeed",
    "load_safetensors",
    "meta_init",
    "no_sync",
    "refresh",
    "register_pass",
    "replace",
    "shard",
    "unshard",
    "without",
]
