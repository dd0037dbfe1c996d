"""Point-to-point messages, posted so that both directions flow at once."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.runtime.comm import Comm

_TAG_MASK = 0x7FFFFFFF


class Mail:
    """The messages of one bucket, to and from `peers` (positions along the axis); by default all.

    All receives are posted before any send: gloo sends a payload when the receiver is ready, and
    says so in the stream in which this rank's own payload would otherwise go first. It reads and
    writes host memory only, so what lies on a GPU goes through that.
    """

    def __init__(self, comm: Comm, peers: Collection[int] | None = None) -> None:
        self._comm = comm
        ring = [(comm.rank + step) % comm.size for step in range(1, comm.size)]
        self._peers = [rank for rank in ring if peers is None or rank in peers]
        self._messages: list[tuple[Sequence[Tensor], Sequence[Tensor], int]] = []

    def post(self, send: Sequence[Tensor], into: Sequence[Tensor], tag: int) -> None:
        """Send `send[i]` to rank `i` and receive `into[i]` from it."""
        self._messages.append((send, into, tag & _TAG_MASK))

    def deliver(self) -> list[Any]:
        """Start them, nearest ranks first; returns what to wait for."""
        group, ranks = self._comm.group, self._comm.ranks
        receives = [
            (dist.irecv, into[source], ranks[source], tag)
            for source in reversed(self._peers)
            for _, into, tag in self._messages
        ]
        sends = [
            (dist.isend, send[to], ranks[to], tag)
            for to in self._peers
            for send, _, tag in self._messages
        ]
        calls = [each for each in receives + sends if each[1].numel()]
        if calls and self._comm.backend == "nccl":
            # One by one, two ranks that both receive first would wait for each other.
            ops = [dist.P2POp(call, tensor, peer, group, tag) for call, tensor, peer, tag in calls]
            return dist.batch_isend_irecv(ops)
        return [_start(*each, group) for each in calls]


class _Staged:
    """A message through host memory; on its device once it was waited for."""

    def __init__(self, work: Any, host: Tensor, into: Tensor | None) -> None:
        self._work, self._host, self._into = work, host, into

    def wait(self) -> None:
        self._work.wait()
        if self._into is not None:
            self._into.copy_(self._host)


def _start(call: Any, tensor: Tensor, peer: int, tag: int, group: dist.ProcessGroup) -> Any:
    if tensor.device.type == "cpu":
        return call(tensor, peer, group=group, tag=tag)
    sends = call is dist.isend
    host = tensor.cpu() if sends else torch.empty_like(tensor, device="cpu")
    return _Staged(call(host, peer, group=group, tag=tag), host, None if sends else tensor)
