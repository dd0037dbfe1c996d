"""`Domain`: what one layout handle stands for at run time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerofx.ir.spec import Layout
from zerofx.runtime import collectives
from zerofx.runtime.collectives import Comm, Pending
from zerofx.runtime.handles import open_handle
from zerofx.runtime.params import ParamState, padded_chunk

if TYPE_CHECKING:
    from zerofx.runtime.session import Session


class Domain:
    """The groups of one layout, and the parameters that have it.

    Attributes:
        layout: how the parameters lie on the mesh.
        session: the sharded model they belong to.
        shard_comm: axis that gathers and reduce-scatters; `None` for replicated parameters.
        replica_comm: axis that all-reduces; `None` without replicas.
    """

    def __init__(
        self, layout: Layout, session: Session, shard_comm: Comm | None, replica_comm: Comm | None
    ) -> None:
        self.layout = layout
        self.session = session
        self.shard_comm = shard_comm
        self.replica_comm = replica_comm
        self._by_storage: dict[int, ParamState] = {}
        open_handle(layout.handle, self)

    @property
    def shard_rank(self) -> int:
        """This rank's position on the shard axis."""
        return self.shard_comm.rank if self.shard_comm else 0

    def register(self, state: ParamState) -> None:
        """Make `state` findable by its shard."""
        self._by_storage[state.shard.untyped_storage().data_ptr()] = state

    def find(self, shard: Tensor) -> ParamState | None:
        """Whose shard this is; `None` for tensors that are no parameter of the model.

        Storage identifies a shard. It changes under `.to()` or `load_state_dict(assign=True)`:
        then all parameters are looked at once.
        """
        key = shard.untyped_storage().data_ptr()
        state = self._by_storage.get(key)
        if state is not None and state.shard.untyped_storage().data_ptr() == key:
            return state
        self._by_storage.clear()
        for other in self.session.states:
            if other.domain is self:
                other.rehouse()
                self.register(other)
        return self._by_storage.get(key)

    def unshard_start(self, shard: Tensor, size: Sequence[int]) -> Pending:
        """Start making the full value of `shard` available; its value is 1-D and padded.

        A replicated parameter is its own full value. A resident one is gathered in place, and
        only if its shard changed since the last time.
        """
        comm = self.shard_comm
        if comm is None:
            return Pending(shard)
        state = self.find(shard)
        name = state.spec.name if state else "a tensor outside the model"
        if state is not None and self.layout.resident:
            if not state.is_stale():
                assert state.buffer is not None
                return Pending(state.buffer)
            return self._refresh(state, shard, comm)
        chunk_numel = -(-size[0] // comm.size) * _row_numel(size)
        out = self.session.pool.take(chunk_numel * comm.size, shard)
        chunk = state.chunk(shard) if state else padded_chunk(shard, chunk_numel)
        tag = self.session.journal.record("all_gather", name)
        works = collectives.all_gather(out, chunk, comm, tag)
        return Pending(out, works, f"all_gather of {name}", keep=(chunk,))

    def _refresh(self, state: ParamState, shard: Tensor, comm: Comm) -> Pending:
        assert state.buffer is not None
        tag = self.session.journal.record("all_gather", state.spec.name)
        works = collectives.all_gather(state.buffer, state.chunk(shard), comm, tag)

        def finish() -> Tensor:
            state.mark_current()
            assert state.buffer is not None
            return state.buffer

        return Pending(state.buffer, works, f"all_gather of {state.spec.name}", finish=finish)

    def unshard_wait(self, pending: Pending, size: Sequence[int]) -> Tensor:
        """The full value: a view of the gathered buffer with the true shape."""
        flat = self.session.wait(pending)
        if self.shard_comm is None:
            return flat
        return flat[: size[0] * _row_numel(size)].view(tuple(size))

    def free(self, full: Tensor) -> None:
        """Give the memory of a full value back to the pool."""
        self.session.pool.give_back(full)

    def reduce_start(self, grad: Tensor, shard: Tensor) -> Pending:
        """Start the mean of a full gradient over all data-parallel ranks.

        With synchronisation off (stages 0 and 1) the gradient is added to a local sum, and the
        result is zero.
        """
        state = self.find(shard)
        self.session.enter_backward()
        if state is not None and self.session.holds_gradients_back():
            state.add_pending(grad)
            return Pending(grad.new_zeros(shard.shape))
        if state is not None and state.pending_grad is not None:
            held = state.take_pending()
            grad = grad if held is None else held.add_(grad)
        name = state.spec.name if state else "a tensor outside the model"
        return self.start_mean(grad, shard, name)

    def start_mean(self, grad: Tensor, shard: Tensor, name: str) -> Pending:
        """Start reduce-scatter, or all-reduce for replicated parameters."""
        comm = self.shard_comm
        if comm is None:
            return self._replica_mean(grad, shard, name)
        tag = self.session.journal.record("reduce_scatter", name)
        rows = self._row_splits(grad)
        flat = grad.detach().contiguous().reshape(-1)
        pending = collectives.reduce_scatter_mean(flat, rows, comm, tag)
        pending.what = f"reduce_scatter of {name}"
        if self.replica_comm is None or shard.numel() == 0:
            return pending
        mine = self.session.wait(pending)
        return self._replica_mean(mine, shard, name)

    def _replica_mean(self, grad: Tensor, shard: Tensor, name: str) -> Pending:
        if self.replica_comm is None or grad.numel() == 0:
            return Pending(grad)
        self.session.journal.record("all_reduce", name)
        pending = collectives.all_reduce_mean(grad, self.replica_comm)
        pending.what = f"all_reduce of {name}"
        return pending

    def reduce_wait(self, pending: Pending, shard: Tensor) -> Tensor:
        """This rank's part of the mean gradient, with the shape of `shard`."""
        return self.session.wait(pending).view(shard.shape)

    def _row_splits(self, grad: Tensor) -> list[int]:
        assert self.shard_comm is not None
        num, row = self.shard_comm.size, _row_numel(grad.shape)
        chunk = -(-grad.shape[0] // num)
        edges = [min(i * chunk, grad.shape[0]) for i in range(num + 1)]
        return [(stop - start) * row for start, stop in itertools.pairwise(edges)]

    def sync_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Rank 0's values, in place, where a program changed them since the last time."""
        self.session.sync_buffers(buffers)


def _row_numel(size: Sequence[int] | torch.Size) -> int:
    out = 1
    for extent in size[1:]:
        out *= extent
    return out
