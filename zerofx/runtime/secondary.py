"""Secondary shards (hpZ): what the ranks of a node hold together of every full value."""

from __future__ import annotations

import dataclasses
import weakref

import torch
from torch import Tensor

from zerofx.config import ZeroConfig
from zerofx.cost.comm import algorithms_for
from zerofx.errors import UnsupportedError
from zerofx.runtime.comm import Comm
from zerofx.runtime.members import new_group
from zerofx.runtime.params import ParamState


@dataclasses.dataclass
class _Copy:
    """One parameter's secondary shard, and the versions of the parameter that it was made of."""

    shard: Tensor
    versions: tuple[int, int, int] | None


class SecondaryShards:
    """The secondary shards of one layout; their memory stays taken from step to step.

    A shard serves while its parameter's versions are those it was made of. All ranks decide alike,
    since what decides is the order of programs and whether a parameter was edited.

    Attributes:
        comm: the ranks of this node.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self._copies: weakref.WeakKeyDictionary[ParamState, _Copy] = weakref.WeakKeyDictionary()

    @property
    def num_bytes(self) -> int:
        """Of all secondary shards on this rank."""
        return sum(copy.shard.nbytes for copy in self._copies.values())

    def put(self, state: ParamState, full: Tensor) -> None:
        """Keep this rank's part of `full`, the value of `state`'s parameter as it is now.

        Always: a write through `.data` before this forward left no trace in the versions.
        """
        numel = -(-full.numel() // self.comm.size)
        flat = full.reshape(-1)
        start = min(self.comm.rank * numel, flat.numel())
        self._put(state, flat[start : start + numel], numel)

    def put_codes(self, state: ParamState, parcels: Tensor) -> None:
        """Keep this rank's part of the codes of `state`'s parameter, `uint8[W, bytes]`."""
        mine = parcels.view(self.comm.size, -1)[self.comm.rank]
        self._put(state, mine, mine.numel())

    def _put(self, state: ParamState, mine: Tensor, numel: int) -> None:
        copy = self._copies.get(state)
        if copy is None or (copy.shard.dtype, copy.shard.device) != (mine.dtype, mine.device):
            copy = self._copies[state] = _Copy(mine.new_zeros(numel), None)
        copy.shard[: mine.numel()].copy_(mine)
        copy.versions = state.versions()

    def take(self, state: ParamState, dtype: torch.dtype) -> Tensor | None:
        """This rank's part of the value, 1-D; `None` if it is out of date or of another dtype.

        Codes have the dtype uint8.
        """
        copy = self._copies.get(state)
        if copy is None or copy.versions != state.versions() or copy.shard.dtype is not dtype:
            return None
        return copy.shard

    def drop(self, state: ParamState) -> None:
        """The parameter changed in a way that leaves no trace, as an optimizer's step does."""
        if state in self._copies:
            self._copies[state].versions = None


def check_nodes(config: ZeroConfig, num_shards: int, node_size: int) -> None:
    """Refuse secondary shards where they could not serve.

    Args:
        config: the user's choices.
        num_shards: ranks along the shard axis.
        node_size: neighbours along it that share a node; 1 if nodes are uneven.

    Raises:
        UnsupportedError: all ranks share one node, or nodes hold one rank each, or unequal numbers.
    """
    if not config.secondary_shards or 1 < node_size < num_shards:
        return
    if node_size == num_shards:
        problem = f"all {num_shards} ranks that share the parameters are on one node"
        remedy = (
            "every gather stays inside it anyway: leave secondary_shards out "
            "(zero_hpz_partition_size)"
        )
    else:
        problem = (
            f"the {num_shards} ranks that share the parameters are alone on their nodes, or nodes "
            "hold unequal numbers of them"
        )
        remedy = "start equally many ranks, at least two, on every node"
    raise UnsupportedError(
        f"option secondary_shards={config.secondary_shards!r}: {problem}",
        f"{remedy}; if ranks lie otherwise, say so by ranks_per_node",
    )


def node_comm(comm: Comm, device: torch.device) -> Comm:
    """The ranks of `comm` that share this rank's node.

    Messages between pairs need no process group of their own; a backend's own gather does, and then
    all ranks of the node must call this.
    """
    size = comm.node_size
    ranks = comm.ranks[comm.node * size :][:size]
    algorithms = algorithms_for(comm.backend, device.type, size, size)
    group = comm.group
    if algorithms.all_gather == "native":
        group = new_group(ranks)
    return Comm(group, comm.backend, comm.column, ranks, algorithms, size)
