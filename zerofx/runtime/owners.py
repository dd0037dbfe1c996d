"""Owners: a tensor of which every rank has rows is whole on one rank for a while."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.runtime.comm import Comm
from zerofx.runtime.mail import Mail
from zerofx.runtime.pending import Pending

if TYPE_CHECKING:
    from zerofx.runtime.session import Session


@dataclasses.dataclass(frozen=True)
class Owned:
    """A tensor that has an owner, as this rank holds it.

    Attributes:
        local: contiguous; this rank's rows, or all of them without `split`.
        shape: of the whole.
        split: whether ranks hold rows, as `DTensor`'s `Shard(0)` deals them out.
        owner: position of the owner along the axis.
    """

    local: Tensor
    shape: torch.Size
    split: bool
    owner: int


def assign_owners(
    groups: Sequence[Sequence[int]], num_ranks: int, owned: Sequence[int] = ()
) -> list[list[int]]:
    """An owner for each tensor, so that ranks own about equally much.

    The largest goes first, each to the rank that owns least so far: no rank owns more than a mean
    share and one tensor. Groups keep their owners when others are appended.

    Args:
        groups: sizes of the tensors of each group.
        num_ranks: ranks to choose from.
        owned: elements that each owns already; by default none.
    """
    loads = sorted(zip(owned or [0] * num_ranks, range(num_ranks), strict=True))
    owners = [[0] * len(sizes) for sizes in groups]
    for sizes, chosen in zip(groups, owners, strict=True):
        for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
            load, chosen[place] = loads[0]
            heapq.heapreplace(loads, (load + sizes[place], chosen[place]))
    return owners


def to_owners(tensors: Sequence[Owned], comm: Comm, tag: int) -> Pending:
    """Start giving every owner its tensors whole; one value for each, empty on other ranks.

    Values of tensors that are not split are the local ones themselves.
    """
    mail, wholes = Mail(comm), list[Tensor]()
    for number, each in enumerate(tensors):
        mine = each.owner == comm.rank
        if not each.split:
            wholes.append(each.local)
            continue
        whole = each.local.new_empty(each.shape if mine else (0,))
        into = rows_of(whole, comm.size)
        if mine:
            into[comm.rank].copy_(each.local)
        mail.post(_only(each.owner, each.local, comm.size), into, tag + number)
        wholes.append(whole)
    return Pending(wholes, mail.deliver(), tuple(each.local for each in tensors))


def from_owners(
    wholes: Sequence[Tensor], tensors: Sequence[Owned], comm: Comm, tag: int
) -> Pending:
    """Start writing what owners have of `tensors`, in `wholes`, to the local ones of all ranks."""
    mail = Mail(comm)
    for number, (whole, each) in enumerate(zip(wholes, tensors, strict=True)):
        mine = each.owner == comm.rank
        nothing = [each.local.new_empty(0)] * comm.size
        send = (
            (rows_of(whole, comm.size) if each.split else [whole] * comm.size) if mine else nothing
        )
        if mine and whole is not each.local:
            each.local.copy_(send[comm.rank])
        into = nothing if mine else _only(each.owner, each.local, comm.size)
        mail.post(send, into, tag + number)
    return Pending([each.local for each in tensors], mail.deliver(), tuple(wholes))


def exchange(
    session: Session, start: Callable[..., Pending], what: str, *tensors: Sequence[Tensor | Owned]
) -> list[Tensor]:
    """Run `to_owners` or `from_owners` over the ranks that share shards.

    Args:
        session: the model.
        start: which of them.
        what: is exchanged, for the journal.
        tensors: arguments of `start`.
    """
    tag = session.journal.record("exchange", f"{len(tensors[-1])} {what} with owners")
    return session.wait(start(*tensors, session.axes.shard, tag))


def rows_of(whole: Tensor, count: int) -> list[Tensor]:
    """What each of `count` ranks holds of `whole`."""
    parts = list(whole.chunk(count))
    return parts + [whole[:0]] * (count - len(parts))


def _only(place: int, tensor: Tensor, count: int) -> list[Tensor]:
    """`tensor` at one place, nothing at the others."""
    return [tensor if rank == place else tensor.new_empty(0) for rank in range(count)]
