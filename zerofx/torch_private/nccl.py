"""What torch knows of NCCL: Inductor's port of the model by which NCCL tunes itself."""

from __future__ import annotations

import torch


def nccl_seconds(collective: str, full_bytes: int, num_ranks: int) -> float:
    """Seconds that NCCL will say a collective takes on GPUs such as this machine's.

    Args:
        collective: `all_gather`, `reduce_scatter` or `all_reduce`.
        full_bytes: of the gathered or reduced tensor.
        num_ranks: of the group, which fill `gpus_of_a_node` before the next node's.
    """
    from torch._inductor.comm_analysis import NCCL_COLL, estimate_nccl_collective_runtime_impl

    kind = NCCL_COLL[collective.upper()]
    return estimate_nccl_collective_runtime_impl(full_bytes, num_ranks, kind) / 1e3


def gpus_of_a_node() -> int:
    """How many `nccl_seconds` takes a node to have: this one's, or eight if it has none."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 8
