"""By which arguments torch remembers the shapes of what operations on `DTensor`s give."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

_aten = torch.ops.aten
_SHAPED_BY = {
    _aten.topk.default: "k",
    _aten.histc.default: "bins",
    _aten.view.dtype: "dtype",
}
"""Operations, and the argument that says their result's shape, which torch does not look at."""


def remember_shapes() -> None:
    """Let `topk(2)` have two columns after a `topk(1)` of the same tensor had one."""
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    for op, name in _SHAPED_BY.items():
        at = [argument.name for argument in op._schema.arguments].index(name)
        info = infos.get(op, RuntimeSchemaInfo())
        infos[op] = replace(info, static_argnum=min(at, info.static_argnum))
