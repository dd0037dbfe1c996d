"""What DTensor lacks: sharding rules, a version counter, numbers that are the whole tensor's.

Importing this module registers all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import register_sharding

from zerofx.runtime.handles import is_ours
from zerofx.torch_private import count_foreach_zero, read_scalars_whole

# `zero_grad(set_to_none=False)` of optimizers with `foreach` or `fused` drops held-back sums too.
count_foreach_zero()
# Clipping by hand, and skipping steps that overflow, ask for norms: all ranks must hear the same.
read_scalars_whole(is_ours)


@register_sharding(torch.ops.aten._is_any_true.default)
def _is_any_true(x: Any) -> list[Any]:
    """Anomaly mode asks it of every gradient; debugging may cost a gather."""
    return [([Replicate()], [Replicate()])]
