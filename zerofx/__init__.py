"""zerofx: ZeRO as a compiler pass behind `torch.compile(model, backend="zero3")`.

Most programs import nothing of this package: the backends `zero` and `zero0` to `zero3` are found
by name.
"""

from zerofx.api import no_sync, refresh, shard, unshard
from zerofx.config import ZeroConfig
from zerofx.errors import ZeroFxError

__all__ = ["ZeroConfig", "ZeroFxError", "no_sync", "refresh", "shard", "unshard"]
