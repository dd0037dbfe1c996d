"""Tensors from the files of other ranks."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zerofx.errors import CheckpointError

WRITTEN = "_zerofx_written"
"""The attribute of an unpickled `DTensor` that says which part of the tensor was pickled."""


def which_rows(value: DTensor, mesh: DeviceMesh) -> tuple[int, ...]:
    """Which of several parts this rank holds: its coordinate on each axis that shards `value`."""
    axes = zip(value.placements, mesh.get_coordinate() or (), mesh.shape, strict=False)
    return tuple(place for how, place, size in axes if how.is_shard() and size > 1)


def refuse_foreign(value: DTensor, mesh: DeviceMesh) -> None:
    """Refuse what was unpickled from the file of a rank that holds other rows.

    Args:
        value: the tensor. Its own mesh, if unpickled, takes this rank for the one that wrote it.
        mesh: the model's.

    Raises:
        CheckpointError: it says which rows these are.
    """
    written = getattr(value, WRITTEN, None)
    if written is not None and written != (own := which_rows(value, mesh)):
        raise CheckpointError(
            f"these are part {written} of a tensor of shape {tuple(value.shape)}, as another rank "
            f"pickled it; this rank holds part {own}",
            "load the file that this rank wrote, or, for a file of one rank, write whole values: "
            "docs/loops.md says how",
        )
