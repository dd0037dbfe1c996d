"""Collectives over flat tensors: start now, wait later.

Only `torch.distributed` process groups. Which calls realise a gather or a reduction is a
`zerofx.cost.comm.Algorithms`, chosen from measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.runtime.comm import Comm
from zerofx.runtime.exchange import (
    LOW_PRECISION,
    Gather,
    Reduction,
    gather_direct,
    gather_native,
    reduce_direct,
    reduce_native,
)
from zerofx.runtime.mail import Mail
from zerofx.runtime.pending import Pending
from zerofx.runtime.two_hop import gather_two_hop, reduce_two_hop

_GATHERS = {
    "native": gather_native,
    "point_to_point": gather_direct,
    "two_hop": gather_two_hop,
}
_REDUCTIONS = {
    "native": reduce_native,
    "point_to_point": reduce_direct,
    "two_hop": reduce_two_hop,
}


def all_gather(outs: list[Tensor], chunks: list[Tensor], comm: Comm, tag: int) -> Pending:
    """Start gathering equal chunks of every member into its output.

    Args:
        outs: each 1-D, `size` chunks long; chunk `i` comes from rank `i`.
        chunks: each 1-D, this rank's chunk; may be its own place in its output.
        comm: the axis.
        tag: number that must agree on all ranks; point-to-point messages carry it.
    """
    unpack: list[Callable[[], None]] = []
    transfers: list[Gather] = []
    for group in _groups(chunks, comm.algorithms.pack_chunk_bytes):
        chunk, out = chunks[group[0]], outs[group[0]]
        if len(group) > 1:
            numel = sum(chunks[member].numel() for member in group)
            out = chunk.new_empty(comm.size * numel)
            chunk = out.chunk(comm.size)[comm.rank]
            torch.cat([chunks[member] for member in group], out=chunk)
            unpack.append(_unpacking(out.view(comm.size, -1), [outs[member] for member in group]))
        if chunk.numel():
            transfers.append(Gather(out, chunk))

    def finish(_: list[Tensor]) -> list[Tensor]:
        for each in unpack:
            each()
        return outs

    return _GATHERS[comm.algorithms.all_gather](transfers, comm, tag).then(finish)


def reduce_scatter_mean(
    grads: Sequence[Tensor],
    splits: Sequence[Sequence[int]],
    comm: Comm,
    tag: int,
) -> Pending:
    """Start the mean over `comm` of each of `grads`, of which this rank keeps its split.

    Args:
        grads: each 1-D and contiguous, the concatenation of its splits. Read until the wait.
        splits: for each gradient, elements that each rank owns; they may differ, and be zero.
        comm: the axis.
        tag: as for `all_gather`.
    """
    parts = [grad.split(list(split)) for grad, split in zip(grads, splits, strict=True)]
    groups: list[list[int]] = []
    transfers: list[Reduction] = []
    for group in _groups(grads, comm.algorithms.pack_bytes):
        # What goes to one rank lies together, whichever members it comes from.
        by_rank = [[parts[member][rank] for member in group] for rank in range(comm.size)]
        sizes = [sum(part.numel() for part in one) for one in by_rank]
        flat = (
            grads[group[0]] if len(group) == 1 else torch.cat([p for one in by_rank for p in one])
        )
        if flat.numel():
            groups.append(group)
            transfers.append(Reduction(flat, sizes))
    mine = [part[comm.rank] for part in parts]

    def finish(means: list[Tensor]) -> list[Tensor]:
        out = list(mine)
        for group, mean in zip(groups, means, strict=True):
            pieces = mean.split([out[member].numel() for member in group])
            for member, piece in zip(group, pieces, strict=True):
                out[member] = piece
        return out

    reduce = _REDUCTIONS[comm.algorithms.reduce_scatter]
    return reduce(transfers, comm, tag).then(finish)


def all_reduce_mean(values: Sequence[Tensor], comm: Comm, tag: int) -> Pending:
    """Start the mean of each of `values` over `comm`; they themselves stay as they are.

    gloo ends the process where ranks out of step give an all-reduce different sizes. So, where
    messages carry tags, little values travel in messages and large ones after a greeting.
    """
    groups = _by_dtype(values, range(len(values)))
    flats = [torch.cat([values[member].detach().reshape(-1) for member in g]) for g in groups]
    totals = [flat.float() if flat.dtype in LOW_PRECISION else flat for flat in flats]

    def finish(sums: list[Tensor]) -> list[Tensor]:
        out = list(values)
        for group, total in zip(groups, sums, strict=True):
            pieces = total.div_(comm.size).split([values[member].numel() for member in group])
            for member, piece in zip(group, pieces, strict=True):
                out[member] = piece.to(values[member].dtype).view(values[member].shape)
        return out

    def reduce(_: list[Tensor]) -> Pending:
        works = [
            dist.all_reduce(total, group=comm.group, async_op=True)
            for total in totals
            if total.numel()
        ]
        return Pending(totals, works)

    if comm.algorithms.untagged:
        return reduce(totals).then(finish)
    if comm.size * sum(total.nbytes for total in totals) > comm.algorithms.pack_bytes:
        greeted = gather_direct([_greeting(comm)], comm, tag)
        greeted.is_short = True
        return greeted.then(reduce).then(finish)
    outs = [total.new_empty(comm.size, total.numel()) for total in totals]
    both = [Gather(out.view(-1), total) for out, total in zip(outs, totals, strict=True)]
    pending = gather_direct([each for each in both if each.chunk.numel()], comm, tag)
    return pending.then(lambda _: [out.sum(0) for out in outs]).then(finish)


def _greeting(comm: Comm) -> Gather:
    """Says that a rank is there."""
    return Gather(torch.empty(comm.size, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8))


def all_to_all(rows: Tensor, ranks: Sequence[int], own: int, comm: Comm, tag: int) -> Pending:
    """Start sending row i to the i-th of `ranks`; rows arrive in their order.

    Args:
        rows: 2-D or more, contiguous, as many as `ranks`.
        ranks: positions along the axis.
        own: this rank's number among them.
        comm: the axis.
        tag: as for `all_gather`.
    """
    arrived = torch.empty_like(rows)
    if comm.algorithms.untagged:
        # No two ranks of a node share a column, so others than these get nothing.
        sizes = [len(rows) // len(ranks) if rank in ranks else 0 for rank in range(comm.size)]
        work = dist.all_to_all_single(arrived, rows, sizes, sizes, comm.group, async_op=True)
        return Pending([arrived], [work], (rows,))
    arrived[own].copy_(rows[own])
    mail = Mail(comm, set(ranks) - {comm.rank})
    place = {rank: number for number, rank in enumerate(ranks)}
    by_rank = [place.get(rank, own) for rank in range(comm.size)]
    mail.post([rows[at] for at in by_rank], [arrived[at] for at in by_rank], tag)
    return Pending([arrived], mail.deliver(), (rows,))


def broadcast(tensor: Tensor, group: dist.ProcessGroup, source: int) -> None:
    """Give a tensor, strided as it may be, the values of global rank `source`."""
    stored = _stored(tensor)
    wire = stored.contiguous()
    dist.broadcast(as_bytes(wire), source, group=group)
    if wire is not stored:
        stored.copy_(wire)


def broadcast_coalesced(
    tensors: Sequence[Tensor], group: dist.ProcessGroup, source: int, wait: Callable[[Any], None]
) -> None:
    """Give every tensor the values of global rank `source`; one message per dtype and device.

    Args:
        tensors: the same on all ranks but for their values.
        group: of those ranks.
        source: one of them.
        wait: for a collective.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for (dtype, _), batch in kinds.items():
        parts = [as_bytes(_stored(tensor)) for tensor in batch]
        wire = torch.cat(parts)
        if wire.numel():
            wait(dist.broadcast(wire, source, group=group, async_op=True))
        for tensor, part in zip(batch, wire.split([part.numel() for part in parts]), strict=True):
            with torch.inference_mode(tensor.is_inference()):  # an evaluation may have assigned it
                stored = _stored(tensor)
                stored.copy_(part.view(dtype).view(stored.shape))


def _stored(tensor: Tensor) -> Tensor:
    """A view in which nothing lies twice, as it does in an expanded tensor."""
    once = (slice(None) if stride else slice(0, 1) for stride in tensor.stride())
    return tensor.detach()[tuple(once)]


def as_bytes(tensor: Tensor) -> Tensor:
    """Its bytes, 1-D: backends know but some of the dtypes."""
    flat = tensor.contiguous().view(-1)
    if flat.numel() == 1:
        flat = flat.as_strided((1,), (1,))  # one element is contiguous at any stride
    return flat.view(torch.uint8)


def _groups(tensors: Sequence[Tensor], limit: int) -> list[list[int]]:
    """All members, in groups that travel together: up to `limit` bytes by dtype, others alone.

    To copy a small one costs less than a message of its own.
    """
    sizes = [tensor.nbytes for tensor in tensors]
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
