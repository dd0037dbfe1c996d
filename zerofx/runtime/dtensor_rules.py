"""What DTensor lacks: sharding rules, a version counter, numbers that are the whole tensor's.

And what torch does for `DTensor` alone, for our kinds of it.

Importing this module registers all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.experimental import register_sharding

from zerofx.runtime.handles import reading
from zerofx.runtime.in_place import note_cleared
from zerofx.runtime.parameter import KINDS, local_tensor
from zerofx.torch_private import (
    clamp_whole,
    compute_pointwise,
    count_foreach_writes,
    foreach_by_default,
    read_scalars_whole,
    update_local_tensors,
)

# Updates by hand, averages of weights, Rprop; `zero_grad(set_to_none=False)` drops held-back sums.
count_foreach_writes(note_cleared)
compute_pointwise()
update_local_tensors()
foreach_by_default(*KINDS)


def _global_value(number: DTensor) -> Tensor:
    """What all ranks hear alike; of a `DTensor` that is not zerofx's what torch gives each."""
    with reading(number.device_mesh) as is_ours:
        return number.full_tensor() if is_ours else local_tensor(number)


# Clipping by hand, and skipping steps that overflow, ask for norms; timm's adaptive clipping clamps
# them where they are.
read_scalars_whole(_global_value)
clamp_whole()


@register_sharding(torch.ops.aten._is_any_true.default)
def _is_any_true(x: Any) -> list[Any]:
    """Anomaly mode asks it of every gradient; debugging may cost a gather."""
    return [([Replicate()], [Replicate()])]
