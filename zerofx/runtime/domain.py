"""`Domain`: what one layout handle stands for at run time."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.errors import ShardingError
from zerofx.ir.spec import Layout, Region
from zerofx.runtime import collectives
from zerofx.runtime.bucket import BucketGather, name_of
from zerofx.runtime.chunks import row_numel, row_splits
from zerofx.runtime.comm import Comm
from zerofx.runtime.handles import open_handle
from zerofx.runtime.params import ParamState
from zerofx.runtime.pending import Pending
from zerofx.runtime.quantized import GatheringOf, Reducing, reduce_codes
from zerofx.runtime.replicas import replica_mean
from zerofx.runtime.secondary import SecondaryShards
from zerofx.torch_private import storage_key

if TYPE_CHECKING:
    from zerofx.runtime.session import Session


class Domain:
    """The groups of one layout, and the parameters that have it.

    Attributes:
        layout: how the parameters lie on the mesh.
        session: the sharded model they belong to.
        shard_comm: axis that gathers and reduce-scatters; `None` for replicated parameters.
        replica_comm: axis that all-reduces; `None` without replicas.
        secondary: second shards on the ranks of `node_comm`, if there is one.
    """

    def __init__(
        self,
        layout: Layout,
        session: Session,
        shard_comm: Comm | None,
        replica_comm: Comm | None,
        node_comm: Comm | None = None,
    ) -> None:
        self.layout = layout
        self.session = session
        self.shard_comm = shard_comm
        self.replica_comm = replica_comm
        self.secondary = None if node_comm is None else SecondaryShards(node_comm)
        # Weakly: parameters are replaced.
        self._by_storage: weakref.WeakValueDictionary[int, ParamState] = (
            weakref.WeakValueDictionary()
        )
        open_handle(layout.handle, self)

    @property
    def shard_rank(self) -> int:
        """This rank's position on the shard axis."""
        return self.shard_comm.rank if self.shard_comm else 0

    def register(self, state: ParamState) -> None:
        """Make `state` findable by its shard."""
        self._by_storage[storage_key(state.shard)] = state

    def find(self, shard: Tensor) -> ParamState | None:
        """Whose shard this is; `None` for tensors that are no parameter of the model.

        Storage identifies a shard, also one without rows, which may have no address. It changes
        under `.to()` or `load_state_dict(assign=True)`: then all parameters are looked at once.

        Raises:
            ShardingError: they are on a device of another type, which the model's groups, and how
                it waits for them, are not for.
        """
        key = storage_key(shard)
        state = self._by_storage.get(key)
        if state is not None and storage_key(state.shard) == key:
            return state
        self._by_storage.clear()
        for other in self.session.states:
            if other.domain is self:
                self._refuse_moved(other)
                other.rehouse()
                self.register(other)
        return self._by_storage.get(key)

    def _refuse_moved(self, state: ParamState) -> None:
        now, then = state.shard.device.type, self.session.device.type
        if now != then:
            raise ShardingError(
                f"the model was sharded on {then} and moved to {now} since",
                "move it before its first forward, or before zerofx.shard; of one that is built "
                "inside meta_init, say where it will live: zerofx.meta_init(device)",
                [state.spec.name],
            )

    def unshard_start(
        self,
        shards: Sequence[Tensor],
        sizes: Sequence[Sequence[int]],
        dtypes: Sequence[torch.dtype | None],
        region: Region = Region.INFERENCE,
        codes: GatheringOf | None = None,
        *,
        keep: bool = False,
    ) -> Pending:
        """Start making full values available; each value is 1-D and padded.

        A replicated parameter is its own full value. A resident one is gathered in place, and
        only if its shard changed since the last time. A backward takes what forward kept; it, and
        the forward of a later micro-batch, gather inside the node where secondary shards are.

        Args:
            shards: this rank's.
            sizes: global shapes.
            dtypes: of the full values, by default those of the shards, which are cast before they
                travel.
            region: of the program that asks.
            codes: kernels for the members at given places, if they travel as codes.
            keep: whether the codes that arrive become secondary shards.
        """
        dtypes = [dtype or shard.dtype for shard, dtype in zip(shards, dtypes, strict=True)]
        if self.shard_comm is None:
            return Pending([shard.to(dtype) for shard, dtype in zip(shards, dtypes, strict=True)])
        gather = BucketGather(self, shards, sizes, dtypes, region)
        return gather.start(self.shard_comm, codes, keep=keep)

    def unshard_wait(self, pending: Pending, member: int, size: Sequence[int]) -> Tensor:
        """The full value of a member: a view of the gathered buffer with the true shape."""
        self.session.wait(pending)
        flat = pending.take(member)
        if self.shard_comm is None:
            return flat
        return flat[: size[0] * row_numel(size)].view(tuple(size))

    def free(self, full: Tensor) -> None:
        """Nobody reads a full value any more."""
        self.session.gathered.give_back(full)

    def keep(self, full: Tensor, shard: Tensor) -> None:
        """Leave a full value to the next backward; its memory stays taken until then."""
        state = self.find(shard)
        if state is not None and not self.session.is_average():
            self.session.kept.put(state, full)
        else:
            self.free(full)

    def keep_shard(self, full: Tensor, shard: Tensor) -> None:
        """Keep this rank's secondary shard of a full value."""
        state = self.find(shard)
        if state is not None and self.secondary is not None and not self.session.is_average():
            self.secondary.put(state, full)

    def reduce_start(
        self, grads: Sequence[Tensor], shards: Sequence[Tensor], codes: Reducing | None = None
    ) -> Pending:
        """Start the mean of full gradients over all data-parallel ranks.

        With synchronisation off gradients are added to local sums, and the results are zero: full
        ones at stages 0 and 1, on a hybrid mesh those that the shard axis has averaged. They are
        summed and travel in the layout's `reduce_dtype`.

        Args:
            grads: this rank's.
            shards: of their parameters.
            codes: kernels, if gradients travel as codes.
        """
        grads = [grad.detach().to(self.layout.reduce_dtype or grad.dtype) for grad in grads]
        states = [self.find(shard) for shard in shards]
        self.session.enter_backward()
        todo, held = self.session.accumulation.add_up("gradients", grads, states, shards)
        return self.start_mean(todo, states, codes) if held is None else held

    def start_mean(
        self,
        grads: Sequence[Tensor],
        states: Sequence[ParamState | None],
        codes: Reducing | None = None,
    ) -> Pending:
        """Start reduce-scatter, or all-reduce for replicated parameters."""
        comm, what = self.shard_comm, ", ".join(map(name_of, states))
        if comm is None:
            return self._across(grads, states)
        tag = self.session.journal.record("reduce_scatter", what)
        splits = [row_splits(grad, comm.size) for grad in grads]
        flat = [grad.contiguous().reshape(-1) for grad in grads]
        if codes is not None:
            owned = [split[comm.rank] for split in splits]
            world, memory = self.session.world, self.session.codes
            pending = reduce_codes(codes, flat, owned, comm, tag, world, states, memory)
        else:
            pending = collectives.reduce_scatter_mean(flat, splits, comm, tag)
        self.session.advance_if_short(pending)
        if self.replica_comm is not None:
            pending.then(lambda scattered: self._across(scattered, states))
        return pending

    def start_held(self, sums: Sequence[Tensor], states: Sequence[ParamState]) -> Pending:
        """Exchange what earlier backwards held back."""
        if self.session.accumulation.held == "means":
            return self._replica_mean(sums, states)
        return self.start_mean(sums, states)

    def _across(self, means: Sequence[Tensor], states: Sequence[ParamState | None]) -> Pending:
        """The mean over replicas of means over the shard axis; as in MiCS, once a step."""
        todo, held = self.session.accumulation.add_up("means", means, states, means)
        if held is not None:
            return held
        return self._replica_mean(todo, states)

    def _replica_mean(
        self, grads: Sequence[Tensor], states: Sequence[ParamState | None]
    ) -> Pending:
        comm, session = self.replica_comm, self.session
        if comm is None:
            return Pending(list(grads))
        most = sum(state.chunk_numel for state in states if state is not None)
        names = ", ".join(map(name_of, states))
        pending = replica_mean(grads, most, comm, names, session.journal)
        session.advance_if_short(pending)
        return pending

    def reduce_wait(
        self, pending: Pending, member: int, shard: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        """This rank's part of a member's mean gradient: as `shard`, but for `dtype` if given."""
        self.session.wait(pending)
        return pending.take(member).view(shard.shape).to(dtype or shard.dtype)

    def sync_buffers(
        self, buffers: Sequence[Tensor], part: Hashable, region: Region, written: Iterable[int]
    ) -> None:
        """Rank 0's values, in place, before the part of a forward that a program is.

        Args:
            buffers: of the program.
            part: names it.
            region: of the model that it is.
            written: which of them it is about to write to.
        """
        trains = region is Region.FORWARD
        self.session.buffers.before_part(self.session, part, buffers, trains=trains)
        self.session.buffers.will_change([buffers[place] for place in written])
