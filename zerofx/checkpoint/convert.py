"""From one format of checkpoint to another, in one process, a tensor or a file at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from zerofx.checkpoint.export import cast_floats, folder_of, put_weights, split, write_index
from zerofx.checkpoint.source import Source, Stored
from zerofx.checkpoint.writer import AtomicWriter, alone, begin, refuse_others
from zerofx.errors import CheckpointError
from zerofx.sharding.paths import local_path

Note = Callable[[str], None]


def to_dcp(source: Source, target: str | os.PathLike[str], note: Note) -> None:
    """Write what `zerofx.checkpoint.load` and every other user of DCP reads.

    Args:
        source: model, optimizer and extra, as far as it has them.
        target: the folder; appears when it is complete.
        note: called with the name of each tensor.

    Raises:
        CheckpointError: the source is in this format already, or the target would lose files.
    """
    if source.format == "dcp":
        raise CheckpointError(
            "the source is a checkpoint of torch.distributed.checkpoint already",
            "load it: any number of ranks and any stage can; or convert it --to safetensors",
        )
    refuse_others(local_path(target).resolve())
    planner = _Reading(source.tensors(), note)
    with alone():
        dcp.save(
            _described(source.state),
            storage_writer=AtomicWriter(target),
            planner=planner,
            no_dist=True,
        )


def to_safetensors(
    source: Source,
    target: str | os.PathLike[str],
    note: Note,
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write the weights in the layout of Hugging Face.

    Args:
        source: at most the tensors of one new file are held at a time.
        target: the folder; appears when it is complete. One that is there keeps its other files.
        note: called with the name of each tensor.
        prefix: of the names that are taken; it is taken off.
        dtype: floating-point tensors are cast to it. None: they stay as they are.
        max_shard_bytes: most bytes of tensors in a file, unless one tensor alone has more.

    Raises:
        CheckpointError: there are no tensors of that prefix, or the target is a file.
    """
    weights = source.tensors(prefix)
    if not weights:
        parts = sorted({name.partition(".")[0] for name in source.tensors()})
        raise CheckpointError(
            f"there are no tensors whose names begin with {prefix!r}",
            f"choose --prefix: names begin with {', '.join(parts)}",
        )
    likes = {name: stored.like for name, stored in weights.items()}
    files = split(likes, max_shard_bytes, dtype)
    folder = folder_of(target)
    partial = begin(folder)
    for file, names in files.items():
        content: dict[str, Tensor] = {}
        for name in names:
            note(name)
            content[name] = cast_floats(weights[name].read(), dtype).contiguous()
        save_file(content, partial / file, metadata={"format": "pt"})
    write_index(partial, files, likes, dtype)
    put_weights(partial, folder)


class _Reading(DefaultSavePlanner):
    """Reads each tensor when it is written."""

    def __init__(self, stored: Mapping[str, Stored], note: Note) -> None:
        super().__init__()
        self._stored = stored
        self._note = note

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            return super().resolve_data(write_item)
        self._note(write_item.index.fqn)
        return self._stored[write_item.index.fqn].read()


def _described(state: Any) -> Any:
    """The nested state, with tensors on the meta device."""
    if isinstance(state, dict):
        return {key: _described(value) for key, value in state.items()}
    return state.like if isinstance(state, Stored) else state
