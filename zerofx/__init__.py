"""zerofx: ZeRO as a compiler pass behind `torch.compile(model, backend="zero3")`.

Most programs import nothing of this package: the backends `zero0` to `zero3` are found by name.
"""

from zerofx.api import load_safetensors, meta_init, no_sync, refresh, shard, unshard
from zerofx.config import ZeroConfig
from zerofx.errors import ZeroFxError

__all__ = [
    "ZeroConfig",
    "ZeroFxError",
    "load_safetensors",
    "meta_init",
    "no_sync",
    "refresh",
    "shard",
    "unshard",
]
