"""How ranks lie and what their collectives cost: the first knows, the others go by it."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.config import ZeroConfig, cache_folder
from zerofx.cost.machine import Machine
from zerofx.cost.tables import CommTable, loads
from zerofx.errors import ConfigError
from zerofx.runtime.assumed import assumed_table
from zerofx.runtime.calibrate import two_hops_pay
from zerofx.runtime.comm import Comm, make_comm, topology_of
from zerofx.runtime.journal import Journal


@dataclasses.dataclass(frozen=True)
class Network:
    """What all ranks of a model agree on.

    Attributes:
        ranks_per_node: neighbours in the order of global ranks that share a node.
        table: costs of collectives along the axis that shards, if they were measured or can be
            computed.
        one_hop: gathers go from rank to rank between nodes, too: the link does not hold them up.
    """

    ranks_per_node: int
    table: CommTable | None = None
    one_hop: bool = False

    def comm(self, group: dist.ProcessGroup, device: torch.device) -> Comm:
        """Describe `group`; the table chooses its algorithms if it is of ranks that lie alike."""
        comm = make_comm(group, device, self.ranks_per_node)
        algorithms = comm.algorithms
        if self.table is not None and topology_of(comm, device) == self.table.topology:
            algorithms = self.table.algorithms()
        elif self.one_hop and algorithms.all_gather == "two_hop":
            algorithms = dataclasses.replace(algorithms, all_gather="point_to_point")
        return dataclasses.replace(comm, algorithms=algorithms)


def agree_on_network(
    journal: Journal, config: ZeroConfig, mesh: DeviceMesh, device: torch.device
) -> Network:
    """What was asked for, what torchrun started on the first rank's node, what was measured there.

    Where no table is kept NCCL's costs are computed; between nodes of other backends both ways of
    gathering are tried.

    Raises:
        ConfigError: that rank's table cannot be read.
        DivergedError: ranks have the model on devices of several types.
    """
    journal.compare_plans(f"on devices of type {device.type}")  # which gives backends
    local = ranks_of_a_node(config.ranks_per_node, dist.get_world_size())
    ranks_per_node = int(journal.from_first_rank(lambda: str(local)))
    comm = make_comm(mesh.get_group(mesh.ndim - 1), device, ranks_per_node)
    told = json.loads(journal.from_first_rank(lambda: json.dumps(_table_or_error(comm, device))))
    if "problem" in told:
        raise ConfigError(told["problem"], told["remedy"])
    if not told["table"]:
        one_hop = comm.algorithms.all_gather == "two_hop" and not two_hops_pay(comm, device)
        one_hop = bool(journal.from_first_rank(lambda: "1" * one_hop))
        return Network(ranks_per_node, one_hop=one_hop)
    return Network(ranks_per_node, loads(told["table"]))


def _table_or_error(comm: Comm, device: torch.device) -> dict[str, str]:
    """What the first rank tells the others: its table, or why it has none; alone it would fail."""
    try:
        table = kept_table(topology_of(comm, device)) or assumed_table(comm, device)
    except ConfigError as error:
        return {"problem": f"rank {comm.ranks[0]}: {error.problem}", "remedy": error.remedy}
    return {"table": "" if table is None else table.dumps()}


def kept_table(topology: str) -> CommTable | None:
    """The table that `zerofx bench comm` kept here; `None`: there is none.

    Raises:
        ConfigError: there is one that cannot be read.
    """
    path = table_path(topology)
    try:
        return loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except (OSError, ValueError) as error:
        remedy = "delete it, or run `zerofx bench comm` again"
        raise ConfigError(f"{path}: {error}", remedy) from error


def ranks_of_a_node(asked: int | None, num_ranks: int) -> int:
    """What was asked for, else what torchrun started on this node, else all of `num_ranks`.

    Raises:
        ConfigError: so many do not make up nodes of equal size.
    """
    if asked and asked < num_ranks and num_ranks % asked:
        raise ConfigError(
            f"ranks_per_node={asked} does not divide {num_ranks} ranks",
            "nodes must have equally many; leave it out where they have not",
        )
    return asked or int(os.environ.get("LOCAL_WORLD_SIZE") or num_ranks)


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
    partial.write_text(text, encoding="utf-8")
    return partial.replace(path)
