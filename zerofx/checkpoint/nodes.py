"""Checkpoints on disks of nodes: ranks write to, and read from, a folder that others do not see.

A node's folder has the rows of its ranks, everything that is no rows, and a `.metadata` that knows
all rows, and of what several nodes have says where it is on this one. Copied into one, the folders
of all nodes are an ordinary checkpoint. Which ranks share a folder is found out by looking.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from zerofx.checkpoint.ranks import Ranks
from zerofx.checkpoint.writer import (
    NODE_LOCAL,
    RUN,
    begin,
    hidden,
    is_complete,
    put_in_place,
    refuse_taken,
    remove_replaced,
    with_own_names,
    write_synced,
)
from zerofx.errors import CheckpointError
from zerofx.sharding.paths import local_path


def save(path: str | os.PathLike[str], state: dict[str, Any], ranks: Ranks, run: str) -> None:
    """Write a state; the checkpoint appears when all nodes have written.

    Args:
        path: the folder, on each node.
        state: rows of this rank, and what is no rows, alike on all ranks.
        ranks: that write.
        run: as `AtomicWriter` has it.

    Raises:
        CheckpointException: DCP could not write.
        CheckpointError: a rank could not write what DCP does not.
    """
    target = Path(path).resolve()
    save_id, folders = _look(target, ranks)
    writer = _NodeWriter(target, folders, ranks.position, save_id)
    metadata = dcp.save(
        state,
        storage_writer=writer,
        planner=_OnceAFolder(folders),
        process_group=ranks.group,
    )
    ranks.everyones(lambda: writer.describe(metadata, run))
    # A kill between the renames of two nodes must not cost what all of them have now.
    whole = _in_common(target, ranks)
    ranks.everyones(lambda: writer.publish(whole))
    ranks.everyones(writer.clean_up)


def find(path: str | os.PathLike[str], ranks: Ranks) -> Path:
    """The checkpoint of that name of which all ranks have their node's folder.

    Raises:
        CheckpointError: there is none; says which save each rank has.
    """
    named = local_path(path)
    for save_id in _in_common(named, ranks):
        return _saves_at(named)[save_id]
    lists = ranks.everyones(lambda: ", ".join(_saves_at(named)) or "none")
    numbered = zip(ranks.numbers or (0,), lists, strict=True)
    raise CheckpointError(
        f"not all ranks have {path} of one save with node_local",
        "start on the nodes that saved it, take what latest(folder, node_local=True) finds, or "
        "load without node_local what was saved without",
        [f"rank {number}: {each}" for number, each in numbered],
    )


def save_of(folder: Path) -> str:
    """Of which save a complete folder of a node is; "" if it is none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it may be removed meanwhile
        if is_complete(folder):
            return (folder / NODE_LOCAL).read_text(encoding="utf-8")
    return ""


def is_node_local(folder: Path) -> bool:
    """Whether a folder is, or was put together of, folders of nodes."""
    return (folder / NODE_LOCAL).is_file()


def _in_common(path: Path, ranks: Ranks) -> list[str]:
    """Saves of that name which all ranks have, in the first rank's order."""
    lists = ranks.everyones(lambda: list(_saves_at(path)))
    return [each for each in lists[0] if all(each in others for others in lists)]


def _saves_at(path: Path) -> dict[str, Path]:
    """Complete folders of that name by their save, the replaced one last."""
    found = {save_of(each): each for each in (path, hidden(path.resolve(), "replaced"))}
    return {save_id: each for save_id, each in found.items() if save_id}


def _look(target: Path, ranks: Ranks) -> tuple[str, list[int]]:
    """A name for a save, and for each rank the first that sees the same folder, by position."""
    partial = hidden(target, "partial")

    def leave() -> str:
        partial.mkdir(parents=True, exist_ok=True)
        mark = uuid.uuid4().hex
        (partial / mark).touch()
        return mark

    marks = ranks.everyones(leave)
    seen = ranks.everyones(lambda: [(partial / mark).exists() for mark in marks].index(True))
    return marks[0], seen


class _OnceAFolder(DefaultSavePlanner):
    """What several ranks have is written once a folder, where DCP's own writes it once."""

    def __init__(self, folders: Sequence[int]) -> None:
        super().__init__()
        self._folders = folders

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _, metadata = super().create_global_plan(all_plans)
        holders: dict[Any, list[tuple[int, WriteItem]]] = collections.defaultdict(list)
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders[self._folders[rank], item.index].append((rank, item))
        written: list[list[WriteItem]] = [[] for _ in all_plans]
        num_bytes = [0 for _ in all_plans]
        for held in holders.values():
            rank, item = min(held, key=lambda each: num_bytes[each[0]])
            written[rank].append(item)
            num_bytes[rank] += item.tensor_storage_size() or 1
        plans = zip(all_plans, written, strict=True)
        return [dataclasses.replace(plan, items=mine) for plan, mine in plans], metadata


class _NodeWriter(FileSystemWriter):
    """Writes to a hidden folder of each node; the first rank there does what is done once."""

    def __init__(self, target: Path, folders: Sequence[int], position: int, save_id: str) -> None:
        super().__init__(hidden(target, "partial"))
        self._target = target
        self._folders = folders
        self._position = position
        self._save = save_id

    @property
    def _is_first(self) -> bool:
        return self._folders[self._position] == self._position

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # All ranks come here before any writes.
        if self._is_first:
            begin(self._target, self._save)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return with_own_names(super().prepare_global_plan(plans), self._save)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        # Only the coordinator comes here; `dcp.save` hands this on to all ranks.
        metadata.storage_data = results

    def describe(self, metadata: Metadata, run: str) -> None:
        """Say what is in the node's folder, and of which save and run it is."""
        if not self._is_first:
            return
        refuse_taken(Path(self.path), self._target, self._save)
        results = metadata.storage_data
        here = [
            each
            for each, first in zip(results, self._folders, strict=True)
            if first == self._position
        ]
        write_synced(Path(self.path) / NODE_LOCAL, self._save)
        if run:
            write_synced(Path(self.path) / RUN, run)
        # Of what several nodes have, the last one counts.
        super().finish(metadata, [*results, *here])

    def publish(self, whole: Sequence[str]) -> None:
        """Give the folder its name; what it replaces stays, or what that had replaced.

        Args:
            whole: saves that all nodes have.
        """
        if self._is_first:
            old = hidden(self._target, "replaced")
            keep = save_of(self._target) not in whole and save_of(old) in whole
            put_in_place(Path(self.path), self._target, keep_replaced=keep)

    def clean_up(self) -> None:
        """Remove what was replaced."""
        if self._is_first:
            remove_replaced(self._target)
