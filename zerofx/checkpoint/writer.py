"""`AtomicWriter`: a checkpoint appears whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zerofx.errors import CheckpointError
from zerofx.sharding.paths import local_path

METADATA = ".metadata"
"""What DCP writes last."""

NODE_LOCAL = ".node_local"
"""What says that a folder is one node's, and of which save."""

RUN = ".run"
"""What says which save of which job a part of a model is of."""

_OURS = (METADATA, f"{METADATA}.tmp", NODE_LOCAL, RUN, "__*_*.distcp")


class AtomicWriter(FileSystemWriter):
    """DCP's own writer, into a hidden sibling that takes the checkpoint's name once it is complete.

    A process that is killed meanwhile leaves the hidden folder, which the next save to the same
    name removes, and the checkpoint that was there before. Usable wherever DCP takes a
    `storage_writer`; all ranks need to see one file system.

    Args:
        path: folder of the checkpoint; an older one of that name is replaced, anything else that
            has it is an error when the save begins.
        run: of a part of a model: what its other parts have, too, if they are of this save.

    Raises:
        CheckpointError: the path is a URL.
    """

    def __init__(self, path: str | os.PathLike[str], run: str = "") -> None:
        self._run = run
        self._mark = uuid.uuid4().hex
        self._target = local_path(path).resolve()
        super().__init__(hidden(self._target, "partial"))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # Only the coordinator comes here, after all ranks have planned and before any writes.
        refuse_others(self._target)
        begin(self._target, self._mark)
        return with_own_names(super().prepare_global_plan(plans), self._mark)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        # DCP's own would warn of what a killed save left behind.
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        refuse_taken(Path(self.path), self._target, self._mark)
        if self._run:
            write_synced(Path(self.path) / RUN, self._run)
        super().finish(metadata, results)
        publish(Path(self.path), self._target)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """DCP warns where there are no ranks; inside the block one process is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is .*", UserWarning)
        yield


def refuse_others(target: Path) -> None:
    """Refuse to replace what is no checkpoint, or has more in it than one.

    Args:
        target: what a checkpoint is to be named; not a link to it.

    Raises:
        CheckpointError: names what is there.
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file", "save to a folder's name that is free")
    others = sorted(
        f"{each.name}/" if each.is_dir() else each.name
        for each in target.iterdir()
        if each.is_dir() or not any(fnmatch.fnmatch(each.name, ours) for ours in _OURS)
    )
    if others:
        raise CheckpointError(
            f"{target} holds more than a checkpoint, which a save there would remove",
            "save to a folder of its own, such as runs/step-000100, or move what it holds",
            others,
        )


def begin(target: Path, mark: str = "") -> Path:
    """The hidden folder in which `target` is written, empty but for a file `mark`."""
    partial = hidden(target, "partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if mark:
        (partial / mark).touch()
    return partial


def with_own_names(plans: Sequence[SavePlan], mark: str) -> list[SavePlan]:
    """Have ranks write to files that another save to the same folder does not write to."""
    named: list[SavePlan] = []
    for each in plans:
        storage = each.storage_data  # what `FileSystemWriter` begins names of files with
        own = dataclasses.replace(storage, prefix=f"{storage.prefix}{mark[:8]}_")
        named.append(dataclasses.replace(each, storage_data=own))
    return named


def refuse_taken(partial: Path, target: Path, mark: str) -> None:
    """Refuse to publish a hidden folder that another process has emptied since; remove the mark.

    Raises:
        CheckpointError: it has.
    """
    try:
        (partial / mark).unlink()
    except FileNotFoundError:
        raise CheckpointError(
            f"another process began to save to {target} meanwhile", "give each job its own folder"
        ) from None


def publish(partial: Path, target: Path) -> None:
    """Give a complete folder its name; the one that has it is removed afterwards."""
    put_in_place(partial, target)
    remove_replaced(target)


def put_in_place(partial: Path, target: Path, *, keep_replaced: bool = False) -> None:
    """Give a complete folder its name; the one that has it waits beside it.

    Args:
        partial: the folder.
        target: its name.
        keep_replaced: whether what waits there already is to stay, and the other one to go.

    Raises:
        CheckpointError: what has the name is more than a checkpoint: it came during an async save.
    """
    refuse_others(target)
    old = hidden(target, "replaced")
    if target.exists() and keep_replaced:
        shutil.rmtree(target)
    elif target.exists():
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
    partial.rename(target)
    sync(target.parent)


def remove_replaced(target: Path) -> None:
    """Remove what had this name before."""
    shutil.rmtree(hidden(target, "replaced"), ignore_errors=True)


def hidden(path: Path, why: str) -> Path:
    """Where a checkpoint lies while it is `partial`, or once it is `replaced`."""
    return path.with_name(f".{path.name}.{why}")


def find(path: str | os.PathLike[str]) -> Path:
    """The checkpoint of that name, even if its replacement was killed between two renames."""
    named = local_path(path)
    old = hidden(named.resolve(), "replaced")
    return old if not named.exists() and is_complete(old) else named


def is_complete(path: Path) -> bool:
    """Whether `path` is a checkpoint with everything in it."""
    return (path / METADATA).is_file()


def complete_below(folder: Path, *, all_replaced: bool = False) -> Sequence[Path]:
    """All complete checkpoints below `folder`, the oldest first.

    Args:
        folder: of checkpoints.
        all_replaced: whether those are among them, too, whose name another one has.
    """
    found = [path for path in below(folder) if is_complete(path) and path.name[0] != "."]
    for old in below(folder, ".*.replaced"):
        if is_complete(old) and (all_replaced or not (folder / shown(old)).exists()):
            found.append(old)
    return oldest_first(found)


def shown(path: Path) -> str:
    """The name under which a checkpoint was saved, which may be replaced."""
    return path.name[1 : -len(".replaced")] if path.name[0] == "." else path.name


def below(folder: Path, pattern: str = "*") -> list[Path]:
    """What is directly in a folder, which may be gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return list(folder.glob(pattern))
    return []


def oldest_first(checkpoints: Iterable[Path]) -> list[Path]:
    """Sort complete checkpoints, without those that another process has removed meanwhile."""
    ages: dict[Path, tuple[int, str]] = {}
    for each in checkpoints:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            ages[each] = (each / METADATA).stat().st_mtime_ns, each.name
    return sorted(ages, key=ages.__getitem__)


def run_of(folder: Path) -> str:
    """Of which save of which job the checkpoint of a part is; "" if that was not said."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return (folder / RUN).read_text(encoding="utf-8")
    return ""


def write_synced(path: Path, text: str) -> None:
    """Write a file that survives a loss of power."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Make a file's content, or renames in a folder, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
