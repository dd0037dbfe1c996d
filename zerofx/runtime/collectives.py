"""Collectives over flat tensors: start now, wait later.

Only `torch.distributed` process groups. Which calls realise a gather or a reduction is a
`zerofx.cost.comm.Algorithms`, chosen from measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.runtime.buffers import Recycler
from zerofx.runtime.comm import Comm
from zerofx.runtime.mail import Mail
from zerofx.torch_private import all_gather_flat, reduce_scatter_flat

_LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclasses.dataclass
class Pending:
    """A collective under way, which moves one value for each member of a bucket.

    Attributes:
        values: the results, once `finish` ran.
        works: what to wait for.
        finish: arithmetic that follows the wait; returns the results.
        keep: tensors that must stay alive until then.
    """

    values: list[Tensor]
    works: Sequence[Any] = ()
    finish: Callable[[], list[Tensor]] | None = None
    keep: tuple[Tensor, ...] = ()


@dataclasses.dataclass(frozen=True)
class _Mean:
    """One reduction of a bucket: what computes its result, and what must stay alive until then."""

    finish: Callable[[], Tensor]
    keep: tuple[Tensor, ...]


def all_gather(outs: list[Tensor], chunks: list[Tensor], comm: Comm, tag: int) -> Pending:
    """Start gathering equal chunks of every member into its output.

    Args:
        outs: each 1-D, `size` chunks long; chunk `i` comes from rank `i`.
        chunks: each 1-D, this rank's chunk; may be its own place in its output.
        comm: the axis.
        tag: number that must agree on all ranks; point-to-point messages carry it.
    """
    mail, unpack = Mail(comm), list[Callable[[], None]]()
    moves: list[tuple[Tensor, Tensor]] = []
    for group in _groups(chunks, comm):
        chunk, out = chunks[group[0]], outs[group[0]]
        if len(group) > 1:
            chunk = torch.cat([chunks[member] for member in group])
            out = chunk.new_empty(comm.size * chunk.numel())
            unpack.append(_unpacking(out.view(comm.size, -1), [outs[member] for member in group]))
        if chunk.numel():
            _gather_one(out, chunk, mail, tag + len(moves))
            moves.append((out, chunk))
    works = mail.deliver()
    if comm.algorithms.all_gather == "point_to_point":
        for out, chunk in moves:
            if not _is_part_of(chunk, out):
                out.chunk(comm.size)[comm.rank].copy_(chunk)

    def finish() -> list[Tensor]:
        for each in unpack:
            each()
        return outs

    keep = tuple(tensor for move in moves for tensor in move)
    return Pending(outs, works, finish=finish, keep=keep)


def reduce_scatter_mean(
    grads: Sequence[Tensor],
    splits: Sequence[Sequence[int]],
    comm: Comm,
    tag: int,
    memory: Recycler,
) -> Pending:
    """Start the mean over `comm` of each of `grads`, of which this rank keeps its split.

    Args:
        grads: each 1-D and contiguous, the concatenation of its splits. Read until the wait.
        splits: for each gradient, elements that each rank owns; they may differ, and be zero.
        comm: the axis.
        tag: as for `all_gather`.
        memory: of the results.
    """
    parts = [grad.split(list(split)) for grad, split in zip(grads, splits, strict=True)]
    mail = Mail(comm)
    under_way: list[tuple[list[int], _Mean]] = []
    for number, group in enumerate(_groups(grads, comm)):
        # What goes to one rank lies together, whichever members it comes from.
        by_rank = [[parts[member][rank] for member in group] for rank in range(comm.size)]
        sizes = [sum(part.numel() for part in one) for one in by_rank]
        flat = (
            grads[group[0]] if len(group) == 1 else torch.cat([p for one in by_rank for p in one])
        )
        if flat.numel():
            mean = _reduce_scatter_one(flat, sizes, mail, tag + number, memory)
            under_way.append((group, mean))
    works = mail.deliver()

    def finish() -> list[Tensor]:
        out = [part[comm.rank] for part in parts]
        for group, mean in under_way:
            pieces = mean.finish().split([out[member].numel() for member in group])
            for member, piece in zip(group, pieces, strict=True):
                out[member] = piece
        return out

    keep = tuple(tensor for _, mean in under_way for tensor in mean.keep)
    return Pending([], works, finish=finish, keep=keep)


def all_reduce_mean(values: Sequence[Tensor], comm: Comm) -> Pending:
    """Start the mean of each of `values` over `comm`; they themselves stay as they are."""
    totals: list[tuple[list[int], Tensor]] = []
    for group in _by_dtype(values, range(len(values))):
        flat = torch.cat([values[member].detach().reshape(-1) for member in group])
        totals.append((group, flat.float() if flat.dtype in _LOW_PRECISION else flat))
    works = [
        dist.all_reduce(total, group=comm.group, async_op=True)
        for _, total in totals
        if total.numel()
    ]

    def finish() -> list[Tensor]:
        out = list(values)
        for group, total in totals:
            pieces = total.div_(comm.size).split([values[member].numel() for member in group])
            for member, piece in zip(group, pieces, strict=True):
                out[member] = piece.to(values[member].dtype).view(values[member].shape)
        return out

    return Pending([], works, finish=finish, keep=tuple(total for _, total in totals))


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


def _groups(tensors: Sequence[Tensor], comm: Comm) -> list[list[int]]:
    """All members, in groups that travel together: small ones by dtype, large ones alone.

    To copy a small one costs less than a message of its own.
    """
    limit = comm.algorithms.pack_bytes
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    large = [[member] for member, size in enumerate(sizes) if not 0 < size <= limit]
    small = [member for member, size in enumerate(sizes) if 0 < size <= limit]
    return [*large, *_by_dtype(tensors, small)]


def _by_dtype(tensors: Sequence[Tensor], members: Iterable[int]) -> list[list[int]]:
    groups: dict[torch.dtype, list[int]] = {}
    for member in members:
        groups.setdefault(tensors[member].dtype, []).append(member)
    return list(groups.values())


def _unpacking(landing: Tensor, outs: list[Tensor]) -> Callable[[], None]:
    """What copies the columns of `landing`, one row a rank, to the members' outputs."""

    def unpack() -> None:
        start = 0
        for out in outs:
            rows = out.view(landing.shape[0], -1)
            rows.copy_(landing[:, start : start + rows.shape[1]])
            start += rows.shape[1]

    return unpack


def _gather_one(out: Tensor, chunk: Tensor, mail: Mail, tag: int) -> None:
    comm = mail.comm
    if comm.algorithms.all_gather == "native":
        mail.works.append(all_gather_flat(out, chunk, comm.group))
    else:
        mail.post([chunk] * comm.size, out.chunk(comm.size), tag)


def _reduce_scatter_one(
    flat: Tensor, splits: Sequence[int], mail: Mail, tag: int, memory: Recycler
) -> _Mean:
    comm = mail.comm
    if comm.algorithms.reduce_scatter == "native":
        return _reduce_scatter_native(flat, splits, mail)
    parts = list(flat.split(list(splits)))
    mine = parts[comm.rank]
    result = _result_place(comm.rank)
    received = [
        mine
        if rank == comm.rank
        else memory.empty(mine.numel(), mine)
        if rank == result
        else torch.empty_like(mine)
        for rank in range(comm.size)
    ]
    mail.post(parts, received, tag)
    return _Mean(lambda: _mean(received, comm.rank), (flat, *received))


def _reduce_scatter_native(grad: Tensor, splits: Sequence[int], mail: Mail) -> _Mean:
    comm = mail.comm
    longest, mine = max(splits), splits[comm.rank]
    if any(split != longest for split in splits):
        padded = grad.new_zeros(longest * comm.size)
        padded[: grad.numel()] = grad
        grad = padded
    nccl = comm.backend == "nccl"
    out = grad.new_empty(longest)
    op = dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM
    mail.works.append(reduce_scatter_flat(out, grad, op, comm.group))
    return _Mean(lambda: (out if nccl else out.div_(comm.size))[:mine], (grad, out))


def _result_place(own: int) -> int:
    """Which of the first two parts was received."""
    return 1 if own == 0 else 0


def _mean(parts: Sequence[Tensor], own: int) -> Tensor:
    """Mean in rank order, so that every rank adds in the same order; in fp32 for 16-bit types.

    The result takes the memory of a received part: fresh memory costs as much as the addition.

    Args:
        parts: of each rank; all but this rank's own were received and may be overwritten.
        own: this rank's position.
    """
    dtype = parts[0].dtype
    if dtype in _LOW_PRECISION:
        parts = [part.float() for part in parts]
    total = torch.add(parts[0], parts[1], out=parts[_result_place(own)])
    for part in parts[2:]:
        total += part
    return total.div_(len(parts)).to(dtype)


def _is_part_of(part: Tensor, whole: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
