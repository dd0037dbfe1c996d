"""The mean over replicas: the last step of a gradient on a hybrid mesh, or of a replicated one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.runtime.chunks import padded_chunk, row_splits
from zerofx.runtime.collectives import all_gather, all_reduce_mean, reduce_scatter_mean
from zerofx.runtime.comm import Comm
from zerofx.runtime.journal import Journal
from zerofx.runtime.pending import Pending


def replica_mean(
    grads: Sequence[Tensor], most: int, comm: Comm, what: str, journal: Journal
) -> Pending:
    """Start the mean over an axis of what each rank has whole.

    Args:
        grads: this rank's; they may be empty.
        most: elements of these on the rank that has most: all ranks of the model go the same way.
        comm: the axis.
        what: names for the journal.
        journal: where the collectives are noted.
    """
    same = all(grad.dtype is grads[0].dtype for grad in grads)
    itemsize = grads[0].dtype.itemsize
    if itemsize < 4 and same and most * itemsize > comm.algorithms.pack_bytes:
        return _mean_by_parts(grads, comm, what, journal)
    return all_reduce_mean(grads, comm, journal.record("all_reduce", what))


def _mean_by_parts(grads: Sequence[Tensor], comm: Comm, what: str, journal: Journal) -> Pending:
    """Reduce-scatter and all-gather: 16-bit gradients travel as such and are added in fp32."""
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    splits = row_splits(flat, comm.size)
    chunk = max(splits)
    tag = journal.record("reduce_scatter", what)

    def gather(scattered: list[Tensor]) -> Pending:
        whole = flat.new_empty(comm.size * chunk)
        own = padded_chunk(scattered[0], whole, comm.rank, chunk)
        return all_gather([whole], [own], comm, journal.record("all_gather", what)).then(split)

    def split(gathered: list[Tensor]) -> list[Tensor]:
        pieces = gathered[0][: flat.numel()].split([grad.numel() for grad in grads])
        return [piece.view(grad.shape) for piece, grad in zip(pieces, grads, strict=True)]

    return reduce_scatter_mean([flat], [splits], comm, tag).then(gather)
