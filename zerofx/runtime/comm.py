"""`Comm`: one axis of the mesh, as this rank sees it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from zerofx.cost.comm import Algorithms, algorithms_for
from zerofx.cost.tables import topology
from zerofx.errors import UnsupportedError
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
        node_size: neighbours along the axis that share a node; `size` if all do, 1 if none.
    """

    group: dist.ProcessGroup
    backend: str
    rank: int
    ranks: tuple[int, ...]
    algorithms: Algorithms
    node_size: int

    @property
    def size(self) -> int:
        """Number of ranks along the axis."""
        return len(self.ranks)

    @property
    def num_nodes(self) -> int:
        """Nodes that the axis spans."""
        return self.size // self.node_size

    @property
    def node(self) -> int:
        """This rank's node along the axis."""
        return self.rank // self.node_size

    @property
    def column(self) -> int:
        """This rank's place on its node."""
        return self.rank % self.node_size

    @property
    def allows_two_hops(self) -> bool:
        """Whether each of several nodes has several ranks."""
        return 1 < self.node_size < self.size

    @property
    def node_positions(self) -> range:
        """Of the ranks of this node, along the axis."""
        first = self.node * self.node_size
        return range(first, first + self.node_size)

    @property
    def column_positions(self) -> range:
        """Of the ranks that have this place on their nodes, along the axis."""
        return range(self.column, self.size, self.node_size)

    @property
    def node_peers(self) -> frozenset[int]:
        """Other ranks of the node, by position along the axis."""
        return frozenset(self.node_positions) - {self.rank}

    @property
    def column_peers(self) -> frozenset[int]:
        """Ranks with the same place on other nodes, by position along the axis."""
        return frozenset(self.column_positions) - {self.rank}


def make_comm(group: dist.ProcessGroup, device: torch.device, ranks_per_node: int) -> Comm:
    """Describe `group` for tensors on `device`.

    Args:
        group: of neighbours or of every n-th rank.
        device: of the tensors.
        ranks_per_node: global ranks that share a node are neighbours; the same on all ranks.
    """
    backend = backend_for(group, device)
    ranks = tuple(dist.get_process_group_ranks(group))
    node_size = node_size_of(ranks, ranks_per_node)
    algorithms = algorithms_for(backend, device.type, len(ranks), node_size)
    return Comm(group, backend, dist.get_rank(group), ranks, algorithms, node_size)


def backend_for(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves tensors on `device`.

    Raises:
        UnsupportedError: none does: a model was left on the CPU, say, beside NCCL.
    """
    if not serves(group, device.type):
        raise UnsupportedError(
            f"the model is on {device.type}, which the process group does not serve "
            f"({dist.get_backend_config(group)})",
            "move the model to this rank's device before its first forward: model.to(device); or "
            'ask for backends of both: init_process_group("cpu:gloo,cuda:nccl")',
        )
    return backend_of(group, device)


def topology_of(comm: Comm, device: torch.device) -> str:
    """Name of the table that serves `comm`."""
    version = str(torch.__version__)
    return topology(comm.backend, device.type, comm.size, comm.node_size, version)


def serves(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether a backend of `group` takes tensors on devices of that type."""
    backends = dist.get_backend_config(group).split(",")
    return device_type in {each.partition(":")[0] for each in backends}


def node_size_of(ranks: Sequence[int], ranks_per_node: int) -> int:
    """How many of `ranks` share a node, if it is the same number on all nodes; else 1."""
    nodes = [rank // ranks_per_node for rank in ranks]
    counts = {len(list(same)) for _, same in itertools.groupby(nodes)}
    return counts.pop() if len(counts) == 1 else 1
