"""What is wrong with a checkpoint: which file, which tensor, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.optim import Optimizer

from zerofx.checkpoint.entries import other_kinds, saved_in
from zerofx.checkpoint.groups import match
from zerofx.checkpoint.nodes import is_node_local
from zerofx.checkpoint.reader import checked, read_into
from zerofx.checkpoint.snapshot import State, leaves
from zerofx.checkpoint.writer import METADATA, alone, is_complete
from zerofx.errors import CheckpointError

_OTHER = "load an older checkpoint: zerofx.checkpoint.latest(folder) finds complete ones"

_GATHER = (
    "by checkpoint.load(…, node_local=True) load what is sharded as it was when it was saved, with "
    "every rank on the node where it was (torchrun --node-rank); for anything else copy the "
    "folders of all nodes into one, or save to a shared folder"
)


def read_metadata(path: Path) -> Metadata:
    """What DCP wrote about a checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or what says what is in it is damaged.
    """
    if path.is_file():
        raise CheckpointError(
            f"{path} is a file, and a checkpoint of zerofx is a folder",
            "load it by what wrote it: torch.load, Lightning's Trainer(…).fit(ckpt_path=…)",
        )
    if not is_complete(path):
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}: there is no file {METADATA}", _OTHER)
    try:
        return FileSystemReader(path).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{path / METADATA} is damaged: {error}", _OTHER) from error


def refuse_truncated(path: Path, metadata: Metadata) -> None:
    """Refuse a checkpoint with files that are missing or too short.

    Raises:
        CheckpointError: names files and tensors; files of a node's folder may be on other nodes.
    """
    entries = list(_entries(metadata))
    files = {file for _, file, _, _ in entries}
    sizes = {file: (path / file).stat().st_size for file in files if (path / file).is_file()}
    lost = [
        f"{file}: {name}"
        for name, file, offset, length in entries
        if sizes.get(file, -1) < offset + length
    ]
    if lost and is_node_local(path) and not files <= sizes.keys():
        raise CheckpointError(f"rows in {path} are not on this node", _GATHER, lost)
    if lost:
        raise CheckpointError(f"files of {path} are missing or truncated", _OTHER, lost)


def refuse_mismatch(
    path: Path, metadata: Metadata, wanted: State, optimizers: Sequence[Optimizer]
) -> None:
    """Refuse a checkpoint of another model or optimizer.

    Raises:
        CheckpointError: names what is missing, what is too much and what has another shape.
    """
    saved = metadata.state_dict_metadata
    mine = dict(leaves(wanted))
    _refuse_other_keys(path, saved, mine)
    if optimizers:
        _refuse_other_kinds(path, metadata, wanted["optimizer"], optimizers)
    problems = [f"{name} is not in the checkpoint" for name in mine if name not in saved]
    parts = tuple(f"{part}." for part in wanted)
    problems += [
        f"{name} is only in the checkpoint"
        for name in saved
        if name.startswith(parts) and name not in mine
    ]
    for name, value in mine.items():
        known = saved.get(name)
        if not isinstance(known, TensorStorageMetadata) or not isinstance(value, Tensor):
            continue
        if known.size != value.shape:
            there, here = list(known.size), list(value.shape)
            problems.append(f"{name}: {there} in the checkpoint, {here} here")
    if problems:
        raise CheckpointError(
            f"{path} does not fit this model and optimizer",
            "build them as they were when it was saved, or load the model alone",
            problems,
        )


def refuse_moved(
    path: Path, metadata: Metadata, wanted: State, optimizers: Sequence[Optimizer]
) -> None:
    """Refuse a checkpoint whose optimizers had the same parameters in other groups.

    Raises:
        CheckpointError: names parameters and numbers of groups; or these cannot be read.
    """
    mine = wanted["optimizer"]["param_groups"]
    there: State = {"optimizer": {"param_groups": [{"params": None} for _ in mine]}}
    try:
        with alone():
            read_into(there, path, alone=True)
    except CheckpointException as error:
        raise unreadable(path, metadata, there, error) from error
    _, moved = match(there["optimizer"]["param_groups"], mine, optimizers)
    if moved:
        raise CheckpointError(
            f"{path} has parameters of the optimizer in other groups",
            "build it with the groups that were saved, in any order, and move parameters after "
            "loading; or load the model alone",
            moved,
        )


def _refuse_other_keys(path: Path, saved: Collection[str], mine: Collection[str]) -> None:
    """Refuse a checkpoint without a model, or without the optimizer."""
    there = {name.partition(".")[0] for name in saved}
    lost = {name.partition(".")[0] for name in mine} & {"model", "optimizer"} - there
    if lost == {"optimizer"} and there <= {"model", "extra"}:
        raise CheckpointError(f"{path} was saved without an optimizer", "load the model alone")
    if lost:
        raise CheckpointError(
            f"{path} has no {' and no '.join(sorted(lost))}, but other keys",
            "fill a state of its keys by torch.distributed.checkpoint.load, and save what is in it "
            "by zerofx.checkpoint.save; or load the model alone, if that is there",
            sorted(there),
        )


def _refuse_other_kinds(
    path: Path, metadata: Metadata, wanted: State, optimizers: Sequence[Optimizer]
) -> None:
    """Refuse a checkpoint of optimizers that keep other things."""
    found = [*other_kinds(wanted, optimizers, saved_in(metadata))]
    if found:
        kinds = ", ".join(dict.fromkeys(kind for kind, _ in found))
        raise CheckpointError(
            f"{path} was saved with another optimizer than {kinds}, or with other options of it",
            "build the optimizer that was saved, with its options; or load the model alone",
            [why for _, why in found],
        )


def unreadable(
    path: Path, metadata: Metadata, wanted: State, error: CheckpointException
) -> CheckpointError:
    """The error for a checkpoint that could not be read: looks for what is damaged."""
    mine = dict(leaves(wanted))
    damaged = [
        f"{file}: {name} ({problem})"
        for name, file, offset, length in _entries(metadata)
        if name in mine and (problem := _try(path / file, offset, length))
    ]
    if not damaged:
        reasons = {str(reason).partition("\n")[0] for reason, _ in error.failures.values()}
        return CheckpointError(
            f"{path} could not be read, though its files are sound: {'; '.join(sorted(reasons))}",
            "build what is loaded into as it was when it was saved, or load the model alone",
        )
    return CheckpointError(f"{path} could not be read", _OTHER, damaged)


def _try(file: Path, offset: int, length: int) -> str:
    """Why an entry cannot be read; "" if it can."""
    try:
        torch.load(checked(file, offset, length), weights_only=False)
    except Exception as error:
        return str(error).partition("\n")[0]
    return ""


def _entries(metadata: Metadata) -> Iterator[tuple[str, str, int, int]]:
    """Name, file, offset and bytes of everything stored."""
    for index, info in (metadata.storage_data or {}).items():
        yield index.fqn, info.relative_path, info.offset, info.length
