"""`open_source`: look at a checkpoint, in whichever format it is."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from zerofx.checkpoint import damage, deepspeed
from zerofx.checkpoint.reader import read_into
from zerofx.checkpoint.snapshot import State
from zerofx.checkpoint.source import Source, Stored, Unread, meta
from zerofx.checkpoint.writer import alone, complete_below, find, is_complete, shown
from zerofx.errors import CheckpointError
from zerofx.sharding.weights import files_of, places_of, readable


def open_source(path: str | os.PathLike[str]) -> Source:
    """Look at a checkpoint; one process is enough.

    Args:
        path: folder of a checkpoint of `torch.distributed.checkpoint` (zerofx, FSDP2) or of
            DeepSpeed ZeRO, or safetensors (a file, or a folder in the layout of Hugging Face).

    Raises:
        CheckpointError: there is none, or files are missing or truncated.
    """
    folder = find(path)
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist", "name a checkpoint's folder or file")
    if is_complete(folder):
        return _of_dcp(folder)
    if deepspeed.is_checkpoint(folder):
        return deepspeed.open_checkpoint(folder)
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        deepspeed.refuse_without_tag(folder)
        _refuse_above(folder)
    return _of_safetensors(folder)


def _refuse_above(folder: Path) -> None:
    """A folder of checkpoints, or of one in parts, is none itself."""
    if inside := sorted(map(shown, complete_below(folder))):
        raise CheckpointError(
            f"{folder} is a folder of checkpoints", "name one of those in it", inside
        )


def _of_dcp(folder: Path) -> Source:
    metadata = damage.read_metadata(folder)
    damage.refuse_truncated(folder, metadata)
    state: State = {}
    for name, stored in metadata.state_dict_metadata.items():
        value: Any = Unread()
        if isinstance(stored, TensorStorageMetadata):
            like = meta(stored.size, stored.properties.dtype)
            value = Stored(like, functools.partial(_read_dcp, folder, metadata, name, like))
        _put(state, (metadata.planner_data or {}).get(name, (name,)), value)
    files = {folder / each.relative_path for each in (metadata.storage_data or {}).values()}
    kind = "checkpoint of torch.distributed.checkpoint"
    return Source(kind, "dcp", state, tuple(sorted(files)))


def _put(state: State, path: tuple[Any, ...], value: Any) -> None:
    *outer, last = path
    for key in outer:
        state = state.setdefault(key, {})
    state[last] = value


def _read_dcp(folder: Path, metadata: Metadata, name: str, like: Tensor) -> Tensor:
    state = {name: torch.empty_like(like, device="cpu")}
    try:
        with alone():
            read_into(state, folder, alone=True)
    except dcp.CheckpointException as error:
        raise damage.unreadable(folder, metadata, state, error) from error
    return state[name]


def _of_safetensors(path: Path) -> Source:
    found: dict[Path, dict[str, Stored]] = {}
    files = files_of(path)
    for file in files:
        found[file] = {}
        with readable(file), safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                part = opened.get_slice(name)
                # An empty slice has the dtype, and costs nothing.
                some = part[:0] if part.get_shape() else opened.get_tensor(name)
                read = functools.partial(_read_safetensors, file, name)
                found[file][name] = Stored(meta(part.get_shape(), some.dtype), read)
    model = {name: found[file][name] for name, file in places_of(path, found).items()}
    return Source("safetensors", "safetensors", {"model": model}, tuple(files))


def _read_safetensors(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)
