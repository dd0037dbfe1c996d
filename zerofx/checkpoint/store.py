"""`save`, `async_save`, `load`: a training run on disk, in the format of DCP."""

from __future__ import annotations

import concurrent.futures
import copy
import dataclasses
import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.checkpoint import damage, nodes, rows, snapshot
from zerofx.checkpoint.ranks import Ranks, ranks_that_hold
from zerofx.checkpoint.reader import needed, read_into
from zerofx.checkpoint.saving import Saving, explained, note_running, wait_for_running
from zerofx.checkpoint.writer import AtomicWriter, alone, find, refuse_others
from zerofx.errors import CheckpointError, UnsupportedError
from zerofx.runtime.parameter import local_tensor
from zerofx.sharding.materialise import on_meta
from zerofx.sharding.paths import local_path
from zerofx.torch_private import with_local

Optimizers = Optimizer | Sequence[Optimizer]
"""One, or several that share a model's parameters."""


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    extra: Any = None,
    *,
    node_local: bool = False,
) -> None:
    """Write a checkpoint; every rank calls it and writes the rows that it owns.

    It appears under its name when it is complete. Nothing is gathered.

    Args:
        path: its folder, on a file system that all ranks see; a checkpoint of that name, or that
            a link of that name points to, is replaced.
        model: plain or sharded, compiled or not. If it is sharded on a mesh of some ranks, those
            alone call this, with a path that no other model is saved to.
        optimizer: whose state is saved with it; several in a list.
        extra: anything picklable besides (step, position in the data); rank 0's is saved. Sharded
            tensors in it must be made whole before.
        node_local: the folder may be on a disk of each node, which then holds the rows of its ranks
            and all that is no rows; `load` and `latest` must be told so, too.

    Raises:
        CheckpointError: what has that name is no checkpoint or holds more than one, a rank could
            not write, or other ranks have saved there; what was there is untouched.
        UnsupportedError: state of an optimizer, or the extra, has tensors that would not be whole.
    """
    ranks, optimizers = ranks_that_hold(model, "checkpoint.save"), _listed(optimizer)
    run = _claim(path, ranks, node_local)
    with explained(path, ranks):
        _refuse_rows(extra, ranks)
        state = _state(model, optimizers, extra, ranks, everywhere=node_local)
        _write(path, state, ranks, node_local, run)


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    extra: Any = None,
    *,
    node_local: bool = False,
) -> Saving:
    """As `save`, but only copy the shards to host memory now and write them in a thread.

    Training may go on at once. Wait for it before the program ends; a save to the same name waits
    for it by itself. A failure is logged, too.

    Returns:
        The save under way, whose `wait()` every rank calls.

    Raises:
        CheckpointError: what has that name is no checkpoint or holds more than one; or the first
            rank cannot pickle the extra.
        UnsupportedError: as `save`.
    """
    ranks, optimizers = ranks_that_hold(model, "checkpoint.async_save"), _listed(optimizer)
    run = _claim(path, ranks, node_local)
    copied: list[Any] = []
    with explained(path, ranks):
        _refuse_rows(extra, ranks)
        ranks.agreed(lambda: copied.append(_unpacked(_packed(extra))))
        extra = copied[0] if copied else None
        # torch's own stagers copy whole storages: at stages 1 and 2 the full resident values.
        state = _copied(_state(model, optimizers, extra, ranks, everywhere=node_local))
    # The thread talks to other ranks while training does: it needs a group of its own.
    group = ranks.spare_group()
    thread = concurrent.futures.ThreadPoolExecutor(1)
    there = dataclasses.replace(ranks, group=group)
    target = Path(path).resolve()
    future = thread.submit(_write, target, state, there, node_local, run)
    thread.shutdown(wait=False)
    note_running(target, future)
    return Saving(path, future, ranks, group)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    node_local: bool = False,
) -> Any:
    """Read a checkpoint into a model and an optimizer; every rank calls it.

    However many ranks wrote it, at whatever stage, this rank reads what it owns. Before the first
    forward the model is plain and every rank reads all of it; `zerofx.shard` it first to avoid
    that. The file `.metadata` and the extra are pickles: load only what you trust.

    Args:
        path: folder of the checkpoint.
        model: takes the values; the names, shapes and buffers must be those that were saved.
        optimizer: takes the state and the options that were saved, learning rate included; several
            in a list, in the order in which they were saved. Groups of parameters must be those
            that were saved, in any order; settings that the checkpoint lacks stay as they are.
        node_local: it was saved so. Ranks must lie on nodes as they did then, so that each finds
            the rows that it owns on its own node.

    Returns:
        The extra that was saved.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or one of another model; or rows that
            a rank needs are on another node. Names files and tensors. Unless a file is damaged
            inside, nothing was changed.
    """
    ranks, optimizers = ranks_that_hold(model, "checkpoint.load"), _listed(optimizer)
    names = ranks.everyones(lambda: _found(path, model))
    if not node_local:  # nodes look for what they have in common
        _refuse_unlike(names, ranks)
    folder = nodes.find(path, ranks) if node_local else find(path)
    metadata = _metadata(folder, ranks, node_local)
    with snapshot.to_fill(model, optimizers, metadata) as state:
        ranks.agreed(lambda: damage.refuse_mismatch(folder, metadata, state, optimizers))
        if "extra" in metadata.state_dict_metadata:
            state["extra"] = None
        if node_local:
            metadata = needed(state, metadata)
            ranks.everyones(lambda: damage.refuse_truncated(folder, metadata))
        if optimizers:
            ranks.agreed(lambda: damage.refuse_moved(folder, metadata, state, optimizers))
        try:
            with alone():
                read_into(state, folder, alone=ranks.alone, group=ranks.group)
        except CheckpointException as error:
            look = functools.partial(damage.unreadable, folder, metadata, state, error)
            found = ranks.everyones(look)
            raise max(found, key=lambda each: len(each.offenders)) from error
    extra = state.get("extra")
    return extra[0] if extra is not None else None


def _found(path: str | os.PathLike[str], model: nn.Module) -> str:
    """Which checkpoint this rank finds."""
    if empty := on_meta(model):
        raise CheckpointError(
            "parameters of the model have no memory to load values into",
            "call zerofx.shard(model, ZeroConfig(stage=…)) first",
            [name for name, _ in empty],
        )
    return find(path).resolve().name


def _refuse_unlike(names: Sequence[str], ranks: Ranks) -> None:
    if len(set(names)) > 1:
        raise CheckpointError(
            "ranks find different checkpoints",
            "let rank 0 look, and tell the others: dist.broadcast_object_list([path], 0)",
            [f"rank {rank}: {name}" for rank, name in zip(ranks.numbers, names, strict=True)],
        )


def _listed(optimizer: Any) -> list[Optimizer]:
    if optimizer is None:
        return []
    found: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for each in found:
        if not isinstance(each, Optimizer):
            raise CheckpointError(
                f"a {type(each).__name__} was given for an optimizer",
                "pass an optimizer, or a list of them; what else is to be saved is `extra`: "
                "checkpoint.save(path, model, optimizer, extra)",
            )
    return found


def _claim(path: str | os.PathLike[str], ranks: Ranks, node_local: bool) -> str:
    """Refuse, on all ranks, to save where others do, or where something else would be lost.

    Returns:
        Which save of which job it is, if it is of a part of a model.
    """
    target = local_path(path).resolve()
    wait_for_running(target)
    run = ranks.claim(path)
    look = ranks.everyones if node_local else ranks.agreed
    look(lambda: refuse_others(target))
    return run


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    if isinstance(value, DTensor):
        return with_local(value, local_tensor(value).detach().to("cpu", copy=True))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _state(
    model: nn.Module, optimizers: Sequence[Optimizer], extra: Any, ranks: Ranks, *, everywhere: bool
) -> snapshot.State:
    """What this rank may write: rows, and if it is the first or `everywhere` what is no rows."""
    state = snapshot.take(model, optimizers, ranks)
    # DCP takes a tuple as one thing: what is inside comes back as it was.
    state["extra"] = (extra,)
    # Of buffers, which differ after a forward, the first rank's win; DCP alone would take any.
    own, rest = rows.split(state)
    sent = ranks.agreed(lambda: _packed(rest)) if everywhere else b""
    if ranks.is_first:
        return state
    return rows.join(own, _unpacked(sent, "cpu")) if everywhere else own


def _refuse_rows(extra: Any, ranks: Ranks) -> None:
    if found := ranks.agreed(lambda: rows.rows_in(extra, "extra")):
        raise UnsupportedError(
            "the extra is the first rank's, and in it are sharded tensors, of which that rank has "
            "its part alone",
            'save modules as one model, torch.nn.ModuleDict({"model": model, "ema": ema}), and '
            "optimizers in a list; or put whole values into the extra, computed on all ranks: "
            "zerofx.checkpoint.full_state_dict(ema), value.full_tensor()",
            found,
        )


def _write(
    path: str | os.PathLike[str],
    state: snapshot.State,
    ranks: Ranks,
    node_local: bool,
    run: str,
) -> None:
    if node_local:
        nodes.save(path, state, ranks, run)
    else:
        dcp.save(state, storage_writer=AtomicWriter(path, run), process_group=ranks.group)


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(content: bytes, device: str | None = None) -> Any:
    return torch.load(io.BytesIO(content), device, weights_only=False)


def _metadata(folder: Path, ranks: Ranks, node_local: bool) -> Metadata:
    """What is in the checkpoint; `node_local`: and where it is on this node."""
    if not node_local:
        return ranks.agreed(lambda: _inspected(folder))
    read: list[Metadata] = []
    ranks.everyones(lambda: read.append(damage.read_metadata(folder)))
    return read[0]


def _inspected(folder: Path) -> Metadata:
    metadata = damage.read_metadata(folder)
    damage.refuse_truncated(folder, metadata)
    return metadata
