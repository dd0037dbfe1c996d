"""What collectives cost where nobody measured them: by torch's model of NCCL."""

from __future__ import annotations

import math

import torch

from zerofx.cost.tables import CommCost, CommTable
from zerofx.runtime.calibrate import SIZES, cost_of, sent_bytes, ways_of
from zerofx.runtime.comm import Comm, topology_of
from zerofx.torch_private import gpus_of_a_node, nccl_seconds


def assumed_table(comm: Comm, device: torch.device) -> CommTable | None:
    """Costs of `comm`, as `calibrate` would name them; `None` for groups that the model misses.

    It knows NCCL, and groups that take all GPUs of a node before those of the next. The exchange of
    codes is left out, of which it counts each byte twice: that finds the link as reductions do.

    Args:
        comm: the group.
        device: of the tensors.
    """
    nodes = math.ceil(comm.size / gpus_of_a_node())
    if comm.backend != "nccl" or comm.size == 1 or comm.num_nodes != nodes:
        return None
    costs: list[CommCost] = []
    for collective, algorithm, dtype in ways_of(comm):
        if collective == "all_to_all":
            continue
        points = [
            (sent_bytes(collective, size, comm.size), nccl_seconds(collective, size, comm.size))
            for size in SIZES
        ]
        costs.append(cost_of(collective, algorithm, dtype, points))
    return CommTable(topology_of(comm, device), tuple(costs), measured=False)
