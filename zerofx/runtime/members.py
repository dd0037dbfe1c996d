"""Which ranks hold a model: those of its mesh, all of them or some."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zerofx.errors import UnsupportedError
from zerofx.torch_private import live_ranks, new_local_group

_idle: dict[str, tuple[object, dist.ProcessGroup]] = {}
_numbers: collections.defaultdict[str, Iterator[int]] = collections.defaultdict(itertools.count)


def ranks_of(mesh: DeviceMesh | None) -> list[int]:
    """The ranks of a mesh, ascending; all ranks without one.

    Raises:
        UnsupportedError: this rank is not among them.
    """
    if mesh is None:
        return list(range(dist.get_world_size()))
    ranks = sorted(mesh.mesh.flatten().tolist())
    if dist.get_rank() not in ranks:
        raise UnsupportedError(
            f"rank {dist.get_rank()} runs a model of the mesh of ranks {named(ranks)}",
            "run it on the ranks of its mesh only, or give this rank a mesh that it is part of",
        )
    return ranks


def members(mesh: DeviceMesh | None) -> list[int]:
    """As `ranks_of`, without those that a `fake` process group only speaks of."""
    return live_ranks(ranks_of(mesh))


def new_group(ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
    """A new group of `ranks`, which all call this and no others; by default of the same backend."""
    return new_local_group(ranks, new_key("group", ranks), backend)


def gloo_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """As `new_group`, for what the host asks or a thread sends."""
    return new_group(ranks, "gloo")


def idle_groups(ranks: Sequence[int]) -> list[str]:
    """Names of the groups of `ranks` that threads have done with."""
    return [
        name
        for name, (world, group) in _idle.items()
        if world is dist.group.WORLD and dist.get_process_group_ranks(group) == list(ranks)
    ]


def take_idle(name: str) -> dist.ProcessGroup:
    """One of `idle_groups`, for another thread."""
    return _idle.pop(name)[1]


def leave_idle(group: dist.ProcessGroup) -> None:
    """A thread has done with a group: its messages have all arrived."""
    _idle[group.group_name] = dist.group.WORLD, group


def new_key(kind: str, ranks: Sequence[int]) -> str:
    """A prefix in the process group's store for what is new on `ranks`, the same on all of them.

    Each set of ranks counts for itself, so that a rank may hold models that others have not.
    """
    everyone = len(ranks) == dist.get_world_size()
    prefix = f"zerofx/{kind}" if everyone else f"zerofx/{kind} of {named(ranks)}"
    return f"{prefix}/{next(_numbers[prefix])}"


def named(ranks: Sequence[int]) -> str:
    """Short for every n-th rank of a large job."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 4 or list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)):
        return ", ".join(map(str, ranks))
    return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step > 1 else "")
