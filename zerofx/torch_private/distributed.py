"""Process groups: collectives that were renamed, and what has no public accessor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from zerofx.torch_private.handlers import HANDLERS, Handler

_COLLECTIVES = (
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_", "allreduce_", "alltoall_"),
    *("allreduce_coalesced_", "alltoall_base_", "broadcast_", "gather_", "recv_", "reduce_"),
    *("reduce_scatter_", "scatter_", "send"),
)


def answer_collectives(handler: Handler) -> None:
    """Have `handler` answer `dist.all_reduce` and the like of `DTensor`s; torch has no rule."""
    found = (getattr(torch.ops.c10d, name, None) for name in _COLLECTIVES)
    HANDLERS.update((packet.default, handler) for packet in found if packet is not None)


def all_gather_flat(out: Tensor, chunk: Tensor, group: dist.ProcessGroup) -> Any:
    """Asynchronous native all-gather of equal chunks (renamed in torch 2.13)."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return call(out, chunk, group=group, async_op=True)


def reduce_scatter_flat(out: Tensor, full: Tensor, op: Any, group: dist.ProcessGroup) -> Any:
    """Asynchronous native reduce-scatter of equal chunks (renamed in torch 2.13)."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return call(out, full, op=op, group=group, async_op=True)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Name of the backend that serves `device`; `get_backend` says "undefined" for defaults."""
    return group._get_backend(device).name()


def new_local_group(
    ranks: Sequence[int], name: str, backend: str | None = None
) -> dist.ProcessGroup:
    """A new group of `ranks`, which alone call this, under a name that they agree on.

    `dist.new_group` names such a group by the number of those that this rank is in already, and
    hangs if it is not the same on all. If the default group is bound to a device, torch splits that
    one's communicator, which waits for the ranks that are not in the new one.
    """
    world, ranks = dist.group.WORLD, sorted(ranks)
    assert world is not None
    default, store = c10d._world.pg_map[world]
    kind: Any = dist.Backend(backend or default)
    place, timeout = ranks.index(dist.get_rank()), c10d._get_default_timeout(kind)
    device, world.bound_device_id = world.bound_device_id, None
    try:
        made, _ = c10d._new_process_group_helper(
            len(ranks), place, ranks, kind, store, c10d.GroupName(name), timeout=timeout
        )
    finally:
        world.bound_device_id = device
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    return made


def default_store() -> dist.Store:
    """The store behind the default process group; torch has no public accessor.

    The `fake` backend may have one that can neither write nor read: one in memory serves.
    """
    if dist.get_backend() == "fake":
        return _store_in_memory(dist.group.WORLD)
    return dist.distributed_c10d._get_default_store()


@lru_cache(maxsize=1)
def _store_in_memory(group: dist.ProcessGroup | None) -> dist.Store:
    return dist.HashStore()


def is_message(work: Any) -> bool:
    """Whether `work` is a point-to-point message: c10d's `OpType` SEND or RECV."""
    return work._get_op_type() in (12, 13)


def is_broken_connection(error: RuntimeError) -> bool:
    """Whether a collective failed on its way; gloo has no type for that, but names its files."""
    words = ("gloo", "imed out", "pair closure")
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def live_ranks(ranks: Iterable[int]) -> list[int]:
    """Those that read and write the default store: the `fake` backend has nobody but this one."""
    return [dist.get_rank()] if dist.get_backend() == "fake" else list(ranks)
