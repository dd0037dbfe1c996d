"""How ranks lie and what their collectives cost: the first knows, the others go by it."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.config import ZeroConfig, cache_folder
from zerofx.cost.machine import Machine
from zerofx.cost.tables import CommTable, loads, topology
from zerofx.errors import ConfigError
from zerofx.runtime.comm import Comm, make_comm
from zerofx.runtime.journal import Journal


@dataclasses.dataclass(frozen=True)
class Network:
    """What all ranks of a model agree on.

    Attributes:
        ranks_per_node: neighbours in the order of global ranks that share a node.
        table: costs of collectives along the axis that shards, if they were measured.
    """

    ranks_per_node: int
    table: CommTable | None = None

    def comm(self, group: dist.ProcessGroup, device: torch.device) -> Comm:
        """Describe `group`; the table chooses its algorithms if it is of ranks that lie alike."""
        comm = make_comm(group, device, self.ranks_per_node)
        if self.table is None or topology_of(comm, device) != self.table.topology:
            return comm
        return dataclasses.replace(comm, algorithms=self.table.algorithms())


def agree_on_network(
    journal: Journal, config: ZeroConfig, mesh: DeviceMesh, device: torch.device
) -> Network:
    """What was asked for, what torchrun started on the first rank's node, what was measured there.

    Raises:
        ConfigError: that rank's table cannot be read.
    """
    local = ranks_of_a_node(config.ranks_per_node, dist.get_world_size())
    ranks_per_node = int(journal.from_first_rank(str(local)))
    comm = make_comm(mesh.get_group(mesh.ndim - 1), device, ranks_per_node)
    path = table_path(topology_of(comm, device))
    text = journal.from_first_rank(path.read_text() if path.exists() else "")
    if not text:
        return Network(ranks_per_node)
    try:
        return Network(ranks_per_node, loads(text))
    except ValueError as error:
        raise ConfigError(
            f"{path} on rank {comm.ranks[0]}: {error}",
            "delete it, or run `zerofx bench comm` again",
        ) from error


def ranks_of_a_node(asked: int | None, num_ranks: int) -> int:
    """What was asked for, else what torchrun started on this node, else all of `num_ranks`."""
    return asked or int(os.environ.get("LOCAL_WORLD_SIZE") or num_ranks)


def topology_of(comm: Comm, device: torch.device) -> str:
    """Name of the table that serves `comm`."""
    version = str(torch.__version__)
    return topology(comm.backend, device.type, comm.size, comm.node_size, version)


def table_path(topology: str) -> Path:
    """Where a table is kept."""
    return cache_folder() / "comm" / f"{topology}.json"


def save_table(table: CommTable) -> Path:
    """Write `table` where the next run looks for it."""
    return _write(table_path(table.topology), table.dumps())


def save_machine(machine: Machine, table: CommTable) -> Path:
    """Write `machine`, whose ranks lie as those of `table`."""
    path = cache_folder() / "machine" / f"{table.topology}.json"
    return _write(path, machine.dumps())


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(text)
    return partial.replace(path)
