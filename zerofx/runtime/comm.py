"""`Comm`: one axis of the mesh, as this rank sees it."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from zerofx.cost.comm import Algorithms, algorithms_for
from zerofx.torch_private import backend_of


@dataclasses.dataclass(frozen=True)
class Comm:
    """One axis of the mesh, as this rank sees it.

    Attributes:
        group: the process group of the ranks along the axis.
        backend: what serves it for the parameters' device.
        rank: this rank's position along it.
        ranks: the global ranks along it, in order.
        algorithms: which c10d calls move the bytes.
    """

    group: dist.ProcessGroup
    backend: str
    rank: int
    ranks: tuple[int, ...]
    algorithms: Algorithms

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)


def make_comm(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """Describe `group` for tensors on `device`."""
    backend = backend_of(group, device)
    return Comm(
        group,
        backend,
        dist.get_rank(group),
        tuple(dist.get_process_group_ranks(group)),
        algorithms_for(backend, device.type),
    )
