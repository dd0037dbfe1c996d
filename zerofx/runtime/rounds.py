"""What a bucket's gather moves along one axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from torch import Tensor

from zerofx.runtime.collectives import all_gather
from zerofx.runtime.comm import Comm
from zerofx.runtime.journal import Journal
from zerofx.runtime.pending import Pending


@dataclasses.dataclass
class GatherRound:
    """Members of a bucket that are gathered along one axis.

    Attributes:
        comm: the axis.
        kind: what the journal calls it.
        names: of the parameters.
        outs: where each value goes, 1-D, `comm.size` chunks long.
        chunks: what this rank has of each.
        codes: gathers them as codes; by default numbers travel.
    """

    comm: Comm
    kind: str
    names: list[str] = dataclasses.field(default_factory=list)
    outs: list[Tensor] = dataclasses.field(default_factory=list)
    chunks: list[Tensor] = dataclasses.field(default_factory=list)
    codes: Callable[[list[Tensor], Sequence[Tensor], Comm, int], Pending] | None = None

    def add(self, name: str, out: Tensor, chunk: Tensor) -> None:
        """One member more."""
        self.names.append(name)
        self.outs.append(out)
        self.chunks.append(chunk)

    def start_after(self, pending: Pending, journal: Journal) -> Pending:
        """Start the gather, if there is anything to gather; it is waited for after `pending`."""
        if not self.outs:
            return pending
        tag = journal.record(self.kind, ", ".join(self.names))
        gather = self.codes or all_gather
        started = gather(self.outs, self.chunks, self.comm, tag)
        return started if pending.done else pending.then(lambda _: started)
