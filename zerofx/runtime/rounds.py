"""What a bucket's gather moves along one axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from zerofx.runtime.collectives import all_gather
from zerofx.runtime.comm import Comm
from zerofx.runtime.journal import Journal
from zerofx.runtime.params import ParamState
from zerofx.runtime.pending import Pending
from zerofx.runtime.quantized import CodeMemory, GatheringOf, gather_codes, gather_kept_codes
from zerofx.runtime.secondary import SecondaryShards


@dataclasses.dataclass
class GatherRound:
    """Members of a bucket that are gathered along one axis.

    Attributes:
        comm: the axis.
        kind: what the journal calls it.
        names: of the parameters.
        chunks: what this rank has of each.
        places: of the members in their bucket.
        outs: where each value goes, 1-D, `comm.size` chunks long; none if codes travel.
        codes: gathers them as codes; by default numbers travel.
    """

    comm: Comm
    kind: str
    names: list[str] = dataclasses.field(default_factory=list)
    chunks: list[Tensor] = dataclasses.field(default_factory=list)
    places: list[int] = dataclasses.field(default_factory=list)
    outs: list[Tensor] = dataclasses.field(default_factory=list)
    codes: Callable[[list[Tensor], Comm, int], Pending] | None = None

    def add(self, place: int, name: str, chunk: Tensor, *out: Tensor) -> None:
        """One member more."""
        self.places.append(place)
        self.names.append(name)
        self.chunks.append(chunk)
        self.outs += out

    def start_after(self, pending: Pending, journal: Journal) -> Pending:
        """Start the gather, if there is anything to gather; it is waited for after `pending`."""
        if not self.places:
            return pending
        tag = journal.record(self.kind, ", ".join(self.names))
        gather = self.codes or functools.partial(all_gather, self.outs)
        started = gather(self.chunks, self.comm, tag)
        return started if pending.done else pending.then(lambda _: started)


def send_codes(
    codes: GatheringOf,
    take: Callable[[Sequence[int]], list[Tensor]],
    everywhere: GatherRound,
    inside: GatherRound,
    memory: CodeMemory,
    states: Sequence[ParamState | None],
    secondary: SecondaryShards | None,
) -> None:
    """Let both rounds of a bucket gather codes.

    Args:
        codes: kernels for the members at given places.
        take: takes memory for the padded full values of those; asked when their codes are here.
        everywhere: members whose shards are coded now.
        inside: members whose codes the ranks of the node keep.
        memory: of the model.
        states: of all members.
        secondary: keeps this rank's part of the codes that come from all ranks.
    """
    kept = [codes([place]) for place in inside.places]
    decoded = functools.partial(take, inside.places)
    inside.codes = functools.partial(gather_kept_codes, kept, decoded)
    if not everywhere.places:
        return
    kernels = codes(everywhere.places)
    travelling = [states[place] for place in everywhere.places]

    def keep(parcels: Tensor) -> None:
        if secondary is None:
            return
        for state, own in zip(travelling, kernels.apart(parcels), strict=True):
            if state is not None:
                secondary.put_codes(state, own)

    decoded = functools.partial(take, everywhere.places)
    everywhere.codes = functools.partial(
        gather_codes, kernels, decoded, states=travelling, memory=memory, arrived=keep
    )
