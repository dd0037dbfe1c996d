"""Gather and reduce-scatter of flat tensors in one hop: by a backend's own calls, or by messages.

Every function takes the transfers of one bucket, and a tag that agrees on all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.runtime.comm import Comm
from zerofx.runtime.mail import Mail
from zerofx.runtime.pending import Pending
from zerofx.torch_private import all_gather_flat, reduce_scatter_flat, shares_storage

LOW_PRECISION = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Gather:
    """One transfer of a gather.

    Attributes:
        out: 1-D, one chunk a rank.
        chunk: 1-D, this rank's chunk; may be its own place in `out`.
    """

    out: Tensor
    chunk: Tensor

    def place_own(self, comm: Comm) -> None:
        """Put this rank's chunk into the output, if it lies elsewhere."""
        if not shares_storage(self.chunk, self.out):
            self.out.chunk(comm.size)[comm.rank].copy_(self.chunk)


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One transfer of a reduce-scatter.

    Attributes:
        flat: 1-D, what this rank adds.
        sizes: elements that each rank owns, in order; they may differ, and be zero.
    """

    flat: Tensor
    sizes: Sequence[int]

    def parts(self) -> list[Tensor]:
        """What each rank owns, views of `flat`."""
        return list(self.flat.split(list(self.sizes)))


def gather_native(transfers: Sequence[Gather], comm: Comm, tag: int) -> Pending:
    """By the backend's own all-gather."""
    works = [all_gather_flat(each.out, each.chunk, comm.group) for each in transfers]
    keep = tuple(tensor for each in transfers for tensor in (each.out, each.chunk))
    return Pending([], works, keep)


def gather_direct(
    transfers: Sequence[Gather], comm: Comm, tag: int, peers: Collection[int] | None = None
) -> Pending:
    """Each rank sends its chunk to every other rank, or to `peers` (positions along the axis)."""
    mail = Mail(comm, peers)
    for number, each in enumerate(transfers):
        mail.post([each.chunk] * comm.size, each.out.chunk(comm.size), tag + number)
    works = mail.deliver()
    for each in transfers:
        each.place_own(comm)
    keep = tuple(tensor for each in transfers for tensor in (each.out, each.chunk))
    return Pending([], works, keep)


def reduce_native(transfers: Sequence[Reduction], comm: Comm, tag: int) -> Pending:
    """By the backend's own reduce-scatter, padded to equal parts; means of what this rank owns."""
    nccl = comm.backend == "nccl"
    op = dist.ReduceOp.AVG if nccl else dist.ReduceOp.SUM
    given = [_padded(each) for each in transfers]
    outs = [flat.new_empty(max(each.sizes)) for each, flat in zip(transfers, given, strict=True)]
    works = [
        reduce_scatter_flat(out, flat, op, comm.group)
        for out, flat in zip(outs, given, strict=True)
    ]
    owned = [each.sizes[comm.rank] for each in transfers]

    def finish(_: list[Tensor]) -> list[Tensor]:
        means = outs if nccl else [out.div_(comm.size) for out in outs]
        return [mean[:numel] for mean, numel in zip(means, owned, strict=True)]

    return Pending([], works, (*given, *outs), (finish,))


def reduce_direct(transfers: Sequence[Reduction], comm: Comm, tag: int) -> Pending:
    """Each rank sends every other what that owns, and adds what it receives."""
    mail = Mail(comm)
    received: list[list[Tensor]] = []
    for number, each in enumerate(transfers):
        parts = each.parts()
        received.append(landing(parts[comm.rank], comm.rank, comm.size))
        mail.post(parts, received[-1], tag + number)

    def finish(_: list[Tensor]) -> list[Tensor]:
        return [mean_of(parts, comm.rank) for parts in received]

    keep = (*(each.flat for each in transfers), *(part for parts in received for part in parts))
    return Pending([], mail.deliver(), keep, (finish,))


def landing(mine: Tensor, own: int, count: int) -> list[Tensor]:
    """`count` parts for `mean_of`: `mine` at its place, and memory for the others."""
    return [mine if place == own else torch.empty_like(mine) for place in range(count)]


def mean_of(parts: Sequence[Tensor], own: int) -> Tensor:
    """Mean in order of place, the same on every rank; 16-bit types are added in fp32.

    The result takes the memory of a received part: fresh memory costs as much as the addition.

    Args:
        parts: all but that of place `own` were received and may be overwritten.
        own: this rank's place.
    """
    dtype = parts[0].dtype
    if dtype in LOW_PRECISION:
        parts = [part.float() for part in parts]
    total = torch.add(parts[0], parts[1], out=parts[_result_place(own)])
    for part in parts[2:]:
        total += part
    return total.div_(len(parts)).to(dtype)


def _result_place(own: int) -> int:
    """Which of the first two parts was received."""
    return 1 if own == 0 else 0


def _padded(transfer: Reduction) -> Tensor:
    """`flat` with each part as long as the longest."""
    longest = max(transfer.sizes)
    if all(size == longest for size in transfer.sizes):
        return transfer.flat
    padded = transfer.flat.new_zeros(len(transfer.sizes), longest)
    for row, part in zip(padded, transfer.parts(), strict=True):
        row[: part.numel()] = part
    return padded.view(-1)
