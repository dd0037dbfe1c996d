"""`save`, `async_save`, `load`, `latest`: a training run on disk, in the format of DCP."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.checkpoint import damage, snapshot
from zerofx.checkpoint.ranks import Ranks, ranks_that_hold
from zerofx.checkpoint.reader import read_into
from zerofx.checkpoint.writer import AtomicWriter, age, alone, complete_below, find
from zerofx.errors import CheckpointError
from zerofx.runtime.parameter import local_tensor
from zerofx.torch_private import with_local


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
) -> None:
    """Write a checkpoint; every rank calls it and writes the rows that it owns.

    It appears under its name when it is complete. Nothing is gathered.

    Args:
        path: its folder, on a file system that all ranks see; one of that name is replaced.
        model: plain or sharded, compiled or not. If it is sharded on a mesh of some ranks, those
            alone call this, with a path that no other model is saved to.
        optimizer: whose state is saved with it.
        extra: anything picklable besides (step, position in the data); rank 0's is saved.

    Raises:
        CheckpointError: a rank could not write, or other ranks have saved there; the checkpoint
            that was there is untouched.
    """
    ranks = ranks_that_hold(model, "checkpoint.save")
    ranks.claim(path)
    state, writer = _state(model, optimizer, extra, ranks), AtomicWriter(path)
    with _explained(path, ranks):
        dcp.save(state, storage_writer=writer, process_group=ranks.group)


class Saving:
    """A save under way."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        future: concurrent.futures.Future[Any],
        ranks: Ranks,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._path = path
        self._future = future
        self._ranks = ranks
        self._group = group

    def done(self) -> bool:
        """Whether this rank's part is written."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete under its name; every rank calls it.

        Raises:
            CheckpointError: a rank could not write.
        """
        try:
            with _explained(self._path, self._ranks):
                self._future.result()
        finally:
            if self._group is not None:
                dist.destroy_process_group(self._group)
                self._group = None


def async_save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Any = None,
) -> Saving:
    """As `save`, but only copy the shards to host memory now and write them in a thread.

    Training may go on at once. One save at a time: wait for it before the next and before the
    program ends.

    Returns:
        The save under way, whose `wait()` every rank calls.

    Raises:
        CheckpointError: on all ranks, if the first one cannot copy the extra.
    """
    ranks = ranks_that_hold(model, "checkpoint.async_save")
    ranks.claim(path)
    copied: list[Any] = []
    ranks.agreed(lambda: copied.append(copy.deepcopy(extra)))
    extra = copied[0] if copied else None
    state, writer = _state(model, optimizer, extra, ranks), AtomicWriter(path)
    # The thread talks to other ranks while training does: it needs a group of its own.
    group = ranks.new_group()
    future = dcp.async_save(
        state, storage_writer=writer, async_stager=_Copies(), process_group=group
    )
    return Saving(path, cast("concurrent.futures.Future[Any]", future), ranks, group)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizer | None = None) -> Any:
    """Read a checkpoint into a model and an optimizer; every rank calls it.

    However many ranks wrote it, at whatever stage, this rank reads what it owns. Before the first
    forward the model is plain and every rank reads all of it; `zerofx.shard` it first to avoid
    that. The file `.metadata` and the extra are pickles: load only what you trust.

    Args:
        path: folder of the checkpoint.
        model: takes the values; the names, shapes and buffers must be those that were saved.
        optimizer: takes the state and the options that were saved, learning rate included.

    Returns:
        The extra that was saved.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or one of another model; names files
            and tensors. Unless a file is damaged inside, nothing was changed.
    """
    folder, ranks = find(path), ranks_that_hold(model, "checkpoint.load")
    metadata = ranks.agreed(lambda: _inspected(folder))
    with snapshot.to_fill(model, optimizer, metadata) as state:
        ranks.agreed(lambda: damage.refuse_mismatch(folder, metadata, state))
        if "extra" in metadata.state_dict_metadata:
            state["extra"] = None
        try:
            with alone():
                read_into(state, folder, alone=ranks.alone, group=ranks.group)
        except CheckpointException as error:
            raise damage.unreadable(folder, metadata, state) from error
    extra = state.get("extra")
    return extra[0] if extra is not None else None


def latest(folder: str | os.PathLike[str], part: str | None = None) -> Path | None:
    """The newest complete checkpoint directly below `folder`; `None` if there is none.

    Args:
        folder: of checkpoints.
        part: where ranks hold different models, whose checkpoints are `folder/<any name>/<part>`:
            the name of this rank's. Every rank of the job must call; what is found is the newest of
            which all of them have their part.
    """
    if part is None:
        found = complete_below(Path(folder))
        return found[-1] if found else None
    named = (part, f".{part}.replaced")
    parts = [
        path
        for whole in Path(folder).glob("*")
        for path in complete_below(whole)
        if path.name in named
    ]
    parts.sort(key=age)
    lists = [[path.parent.name for path in parts]]
    if dist.is_initialized():
        lists *= dist.get_world_size()
        dist.all_gather_object(lists, lists[0])
    everyones = [name for name in lists[0] if all(name in each for each in lists)]
    return next((path for path in parts if path.parent.name in everyones[-1:]), None)


class _Copies(AsyncStager):
    """Copies what this rank owns to the host, and no more.

    torch's own stagers copy whole storages: at stages 1 and 2 the full resident values.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return cast(dict[str, Any], _copied(state_dict))

    def synchronize_staging(self) -> None:
        """Staging is done when `stage` returns."""

    def close(self) -> None:
        """Nothing is held."""


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        return with_local(value, local_tensor(value).detach().to("cpu", copy=True))
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return copy.deepcopy(value)


def _state(
    model: nn.Module, optimizer: Optimizer | None, extra: Any, ranks: Ranks
) -> snapshot.State:
    """What this rank writes."""
    state = snapshot.take(model, optimizer)
    # DCP takes a tuple as one thing: what is inside comes back as it was.
    state["extra"] = (extra,)
    if not ranks.is_first:
        # Of buffers, which differ after a forward, the first rank's win; DCP alone would take any.
        state = _sharded_only(state)
    return state


def _sharded_only(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _sharded_only(value) if isinstance(value, dict) else value
        for key, value in state.items()
        if isinstance(value, (dict, DTensor))
    }


def _inspected(folder: Path) -> Any:
    metadata = damage.read_metadata(folder)
    damage.refuse_truncated(folder, metadata)
    return metadata


@contextlib.contextmanager
def _explained(path: str | os.PathLike[str], ranks: Ranks) -> Iterator[None]:
    try:
        with alone():
            yield
    except CheckpointException as error:
        # DCP counts along the group.
        numbers = ranks.numbers or (0,)
        reasons = [f"rank {numbers[at]}: {reason}" for at, (reason, _) in error.failures.items()]
        raise CheckpointError(
            f"the checkpoint {path} could not be written",
            "see whether the folder exists, may be written to and has room on every rank's host",
            reasons,
        ) from error
