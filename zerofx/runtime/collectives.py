"""Collectives over flat tensors: start now, wait later.

Only `torch.distributed` process groups. Which calls realise a gather or a reduction is a
`zerofx.cost.comm.Algorithms`, chosen from measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.cost.comm import Algorithms, algorithms_for
from zerofx.torch_private import all_gather_flat, backend_of, reduce_scatter_flat

_LOW_PRECISION = (torch.float16, torch.bfloat16)


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


@dataclasses.dataclass
class Pending:
    """A collective under way.

    Attributes:
        value: the tensor that holds the result once `finish` ran.
        works: what to wait for.
        what: what it is, for reports of a hang.
        finish: arithmetic that follows the wait; returns the result.
        keep: tensors that must stay alive until then.
    """

    value: Tensor
    works: Sequence[Any] = ()
    what: str = ""
    finish: Callable[[], Tensor] | None = None
    keep: tuple[Tensor, ...] = ()


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


def all_gather(out: Tensor, chunk: Tensor, comm: Comm, tag: int) -> list[Any]:
    """Start gathering equal chunks into `out`.

    Args:
        out: 1-D, `size` chunks long; chunk `i` comes from rank `i`.
        chunk: 1-D, this rank's chunk; may be its own place in `out`.
        comm: the axis.
        tag: number that must agree on all ranks; point-to-point messages carry it.
    """
    if comm.algorithms.all_gather == "native":
        return [all_gather_flat(out, chunk, comm.group)]
    slots = list(out.chunk(comm.size))
    if not _is_part_of(chunk, out):
        slots[comm.rank].copy_(chunk)
    return _exchange([chunk] * comm.size, slots, comm, tag)


def reduce_scatter_mean(grad: Tensor, splits: Sequence[int], comm: Comm, tag: int) -> Pending:
    """Start the mean over `comm` of `grad`, of which this rank keeps its split.

    Args:
        grad: 1-D and contiguous, the concatenation of all splits. It is read until the wait.
        splits: elements that each rank owns; they may differ, and may be zero.
        comm: the axis.
        tag: as for `all_gather`.
    """
    if comm.algorithms.reduce_scatter == "native":
        return _reduce_scatter_native(grad, splits, comm)
    parts = list(grad.split(list(splits)))
    mine = parts[comm.rank]
    received = [mine if i == comm.rank else torch.empty_like(mine) for i in range(comm.size)]
    works = _exchange(parts, received, comm, tag)

    def finish() -> Tensor:
        return _mean(received)

    return Pending(mine, works, finish=finish, keep=(grad, *received))


def all_reduce_mean(value: Tensor, comm: Comm) -> Pending:
    """Start the mean of `value` over `comm`; `value` itself stays as it is."""
    total = value.detach().clone(memory_format=torch.contiguous_format)
    if total.dtype in _LOW_PRECISION:
        total = total.float()
    work = dist.all_reduce(total, group=comm.group, async_op=True)

    def finish() -> Tensor:
        return total.div_(comm.size).to(value.dtype)

    return Pending(total, [work], finish=finish, keep=(total,))


def broadcast_coalesced(tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int) -> None:
    """Give every tensor the values of global rank `source`; one message per dtype and device."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, _), batch in kinds.items():
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in batch])
        wire = flat.view(torch.uint8) if dtype is torch.bool else flat
        dist.broadcast(wire, source, group=group)
        values = flat.split([tensor.numel() for tensor in batch])
        for tensor, value in zip(batch, values, strict=True):
            tensor.detach().copy_(value.view(tensor.shape))


def _exchange(send: Sequence[Tensor], into: Sequence[Tensor], comm: Comm, tag: int) -> list[Any]:
    """Start sending `send[i]` to rank `i` and receiving `into[i]` from it, nearest first."""
    works: list[Any] = []
    for step in range(1, comm.size):
        to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
        if send[to].numel():
            works.append(dist.isend(send[to], comm.ranks[to], group=comm.group, tag=tag))
        if into[source].numel():
            works.append(dist.irecv(into[source], comm.ranks[source], group=comm.group, tag=tag))
    return works


def _reduce_scatter_native(grad: Tensor, splits: Sequence[int], comm: Comm) -> Pending:
    longest, mine = max(splits), splits[comm.rank]
    if any(split != longest for split in splits):
        padded = grad.new_zeros(longest * comm.size)
        padded[: grad.numel()] = grad
        grad = padded
    nccl = comm.backend == "nccl"
    out = grad.new_empty(longest)
    op = dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM
    work = reduce_scatter_flat(out, grad, op, comm.group)

    def finish() -> Tensor:
        return (out if nccl else out.div_(comm.size))[:mine]

    return Pending(out, [work], finish=finish, keep=(grad,))


def _mean(parts: Sequence[Tensor]) -> Tensor:
    """Mean in rank order, so that every rank adds in the same order; in fp32 for 16-bit types."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in _LOW_PRECISION else parts[0].clone()
    for part in parts[1:]:
        total += part
    return total.div_(len(parts)).to(dtype)


def _is_part_of(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
