"""Point-to-point messages, posted so that both directions flow at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerofx.runtime.comm import Comm

_TAG_MASK = 0x7FFFFFFF


class Mail:
    """The messages of one bucket.

    All receives are posted before any send: gloo sends a payload when the receiver is ready, and
    says so in the stream in which this rank's own payload would otherwise go first.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.works: list[Any] = []
        self._messages: list[tuple[Sequence[Tensor], Sequence[Tensor], int]] = []

    def post(self, send: Sequence[Tensor], into: Sequence[Tensor], tag: int) -> None:
        """Send `send[i]` to rank `i` and receive `into[i]` from it."""
        self._messages.append((send, into, tag & _TAG_MASK))

    def deliver(self) -> list[Any]:
        """Start them, nearest ranks first; returns what to wait for."""
        group, size, ranks = self.comm.group, self.comm.size, self.comm.ranks
        for step in range(1, size):
            source = (self.comm.rank - step) % size
            for _, into, tag in self._messages:
                if into[source].numel():
                    self.works.append(dist.irecv(into[source], ranks[source], group=group, tag=tag))
        for step in range(1, size):
            to = (self.comm.rank + step) % size
            for send, _, tag in self._messages:
                if send[to].numel():
                    self.works.append(dist.isend(send[to], ranks[to], group=group, tag=tag))
        return self.works
