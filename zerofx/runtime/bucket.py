"""`BucketGather`: the full values of a bucket, each from where this rank can have it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.ir.spec import Region
from zerofx.runtime.chunks import padded_chunk, row_numel
from zerofx.runtime.comm import Comm
from zerofx.runtime.params import ParamState
from zerofx.runtime.pending import Pending
from zerofx.runtime.quantized import GatheringOf
from zerofx.runtime.rounds import GatherRound, send_codes

if TYPE_CHECKING:
    from zerofx.runtime.domain import Domain


class BucketGather:
    """One `unshard_start` of a domain with a shard axis; the arguments are those that it was given.

    Values take memory when something is written there: at once where numbers travel, and where
    codes travel once these have arrived.
    """

    def __init__(
        self,
        domain: Domain,
        shards: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype],
        region: Region,
    ) -> None:
        self._domain = domain
        self._shards, self._sizes, self._dtypes, self._region = shards, sizes, dtypes, region
        self._states = [domain.find(shard) for shard in shards]
        self._values: dict[int, Tensor] = {}
        self._refreshed: list[ParamState] = []

    def start(self, comm: Comm, codes: GatheringOf | None, *, keep: bool) -> Pending:
        """Start what is needed, along the shard axis `comm`."""
        second = self._domain.secondary
        everywhere = GatherRound(comm, "all_gather")
        inside = GatherRound(second.comm if second else comm, "gather_in_node")
        for place, state in enumerate(self._states):
            value = self._current(place)
            if value is not None:
                self._values[place] = value
                continue
            self._add(place, everywhere, inside, codes=codes is not None)
            if state is not None and self._domain.layout.resident:
                self._refreshed.append(state)
        session = self._domain.session
        if codes is not None:
            kept = second if keep and not session.is_average() else None
            send_codes(codes, self._take, everywhere, inside, session.codes, self._states, kept)
        pending = Pending([])
        for each in (everywhere, inside):
            pending = each.start_after(pending, session.journal)
        return Pending(self._finish([])) if pending.done else pending.then(self._finish)

    def _add(
        self, place: int, everywhere: GatherRound, inside: GatherRound, *, codes: bool
    ) -> None:
        """Let one member travel: inside the node, where there is a secondary shard."""
        state = self._states[place]
        name = name_of(state)
        second = self._secondary_shard(state, torch.uint8 if codes else self._dtypes[place])
        if codes:
            around = everywhere if second is None else inside
            around.add(place, name, self._chunk_at_rest(place) if second is None else second)
            return
        (out,) = self._take([place])
        if second is not None:
            inside.add(place, name, second, out[: second.numel() * inside.comm.size])
        else:
            everywhere.add(place, name, self._chunk(place, out), out)

    def _take(self, places: Sequence[int]) -> list[Tensor]:
        """Memory for padded full values, each 1-D: resident copies, or what the allocator has."""
        domain = self._domain
        for place in places:
            state, shard = self._states[place], self._shards[place]
            if state is not None and domain.layout.resident:
                domain.session.handed_out.refuse_written([state])  # which the gather would hide
                self._values[place] = state.resident_copy()
            else:
                numel = domain.layout.num_shards * self._chunk_numel(place)
                taken = domain.session.gathered.take(numel, self._dtypes[place], shard.device)
                self._values[place] = taken
        return [self._values[place] for place in places]

    def _finish(self, _: list[Tensor]) -> list[Tensor]:
        """All values are here."""
        for state in self._refreshed:
            state.mark_current()
        return [self._values[place] for place in range(len(self._shards))]

    def _chunk(self, place: int, out: Tensor) -> Tensor:
        """What this rank has of a value, padded, in the dtype of `out`: best in its place there."""
        state, shard = self._states[place], self._shards[place]
        if state is not None:
            return state.chunk(shard, out)
        return padded_chunk(shard, out, self._domain.shard_rank, self._chunk_numel(place))

    def _chunk_at_rest(self, place: int) -> Tensor:
        """What this rank has of a value, padded, in the dtype of its shard."""
        state, shard = self._states[place], self._shards[place]
        if state is not None and state.buffer is not None:
            return state.chunk(shard, shard)
        # Adopted parameters, as of `load_state_dict(assign=True)`, have no padding at rest.
        numel = self._chunk_numel(place)
        return padded_chunk(shard, shard.new_empty(numel), 0, numel)

    def _chunk_numel(self, place: int) -> int:
        size = self._sizes[place]
        return -(-size[0] // self._domain.layout.num_shards) * row_numel(size)

    def _current(self, place: int) -> Tensor | None:
        """The full value of a parameter, if this rank has it already."""
        state, session = self._states[place], self._domain.session
        if state is None:
            return None
        if self._domain.layout.resident:
            return None if state.is_stale() else state.buffer
        if self._region is not Region.BACKWARD:
            session.kept.drop(state)
            return None
        return session.kept.take(state, self._dtypes[place])

    def _secondary_shard(self, state: ParamState | None, dtype: torch.dtype) -> Tensor | None:
        """This rank's secondary shard, if the value may be gathered inside the node."""
        secondary = self._domain.secondary
        if state is None or secondary is None:
            return None
        accumulation = self._domain.session.accumulation
        later = self._region is Region.FORWARD and accumulation.continues()
        return secondary.take(state, dtype) if later or self._region is Region.BACKWARD else None


def name_of(state: ParamState | None) -> str:
    """What errors and journals call a member."""
    return state.spec.name if state else "a tensor outside the model"
