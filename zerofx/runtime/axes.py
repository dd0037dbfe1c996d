"""The axes of the mesh, as this rank sees them."""

from __future__ import annotations

import dataclasses
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofx.config import ZeroConfig
from zerofx.errors import UnsupportedError
from zerofx.ir.spec import Layout
from zerofx.runtime.comm import Comm
from zerofx.runtime.members import new_group
from zerofx.runtime.network import Network
from zerofx.runtime.secondary import check_nodes, node_comm


@dataclasses.dataclass(frozen=True)
class Axes:
    """Who exchanges what with whom.

    Attributes:
        world: all ranks of the mesh.
        shard: those that share one set of shards.
        replica: those that hold the same shard; `None` without replicas.
        node: those of `shard` on this node, if they keep secondary shards.
        sharing: neighbours in `world` that share each sequence.
    """

    world: Comm
    shard: Comm
    replica: Comm | None
    node: Comm | None
    sharing: int = 1

    @functools.cached_property
    def sequence(self) -> dist.ProcessGroup:
        """The ranks that share this rank's sequences; they call this together."""
        ranks = self.world.ranks
        start = self.world.rank // self.sharing * self.sharing
        return new_group(ranks[start : start + self.sharing])


def make_axes(
    config: ZeroConfig,
    mesh: DeviceMesh,
    network: Network,
    device: torch.device,
    node: Comm | None = None,
) -> Axes:
    """Describe the axes of `mesh`.

    Args:
        config: the user's choices.
        mesh: 1-D `(shard,)` or 2-D `(replicate, shard)`.
        network: how ranks lie.
        device: of the parameters.
        node: of a model that is copied: groups are not made anew.

    Raises:
        UnsupportedError: a 2-D mesh leaves ranks out, secondary shards could not serve, or ranks
            cannot share sequences so.
    """
    axes = reversed(range(mesh.ndim))
    shard, *rest = (network.comm(mesh.get_group(axis), device) for axis in axes)
    check_nodes(config, shard.size, shard.node_size)
    if node is None and config.secondary_shards:
        node = node_comm(shard, device)
    world, sharing = _world(mesh, network, device), config.sequence_parallel
    if world.size % sharing:
        raise UnsupportedError(
            f"{world.size} ranks cannot form groups of sequence_parallel={sharing}",
            "choose a divisor of the number of ranks",
        )
    return Axes(world, shard, rest[0] if rest else None, node, sharing)


def layouts_of(
    config: ZeroConfig,
    num_ranks: int,
    num_shards: int,
    node_sizes: tuple[int, int, int],
    handles: tuple[int, int],
) -> tuple[Layout, Layout]:
    """How parameters lie that are split over the shard axis, and those that every rank holds whole.

    Args:
        config: the user's choices.
        num_ranks: of the mesh.
        num_shards: ranks that share the first kind; 1 at stage 0.
        node_sizes: for each kind, and of replicas of a shard; see `Layout`.
        handles: for each kind, see `Layout`.
    """
    sharded = Layout(
        handles[0],
        num_shards,
        num_ranks // num_shards,
        config.stage in (1, 2),
        reduce_dtype=config.reduce_dtype,
        grad_dtype=config.grad_dtype,
        node_size=node_sizes[0],
        replica_node_size=node_sizes[2],
        secondary=bool(config.secondary_shards),
        secondary_codes=config.secondary_shards == "codes",
    )
    whole = Layout(
        handles[1],
        1,
        num_ranks,
        False,
        reduce_dtype=config.reduce_dtype,
        grad_dtype=config.grad_dtype,
        node_size=node_sizes[1],
    )
    return sharded, whole


def _world(mesh: DeviceMesh, network: Network, device: torch.device) -> Comm:
    if mesh.ndim == 1:
        return network.comm(mesh.get_group(), device)
    if mesh.size() != dist.get_world_size():
        raise UnsupportedError(
            f"a 2-D mesh of {mesh.size()} ranks inside a world of {dist.get_world_size()}",
            "use a mesh over all ranks",
        )
    group = dist.group.WORLD
    assert group is not None
    return network.comm(group, device)


def replicas_of(config: ZeroConfig, num_ranks: int) -> int:
    """How many ranks hold the same shard.

    Raises:
        UnsupportedError: the ranks cannot be divided so.
    """
    replicas = config.replicate
    if config.mesh is not None:
        replicas = config.mesh.size(0) if config.mesh.ndim == 2 else 1
    if num_ranks % replicas:
        raise UnsupportedError(
            f"{num_ranks} ranks cannot form replicate={replicas} equal groups",
            "choose a divisor of the world size",
        )
    return replicas


def make_mesh(config: ZeroConfig, device: torch.device) -> DeviceMesh:
    """The mesh that was asked for; by default all ranks in a row.

    Raises:
        UnsupportedError: there is no process group, it cannot be divided so, or the mesh is not of
            the model's type of device.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError(
            "there is no default process group",
            "call torch.distributed.init_process_group() before the first forward "
            "(under torchrun it needs no arguments)",
        )
    if dist.get_backend() == "mpi":
        raise UnsupportedError("the MPI backend is not supported", 'use "nccl" or "gloo"')
    if config.mesh is not None:
        if config.mesh.device_type != device.type:
            raise UnsupportedError(
                f"the model is on {device.type}, and the mesh is of type {config.mesh.device_type}",
                "move the model to the mesh's type of device before its first forward, or make a "
                f'mesh of type "{device.type}"',
            )
        return config.mesh
    num_ranks = dist.get_world_size()
    replicas = replicas_of(config, num_ranks)
    if replicas == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("shard",))
    shape = replicas, num_ranks // replicas
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
