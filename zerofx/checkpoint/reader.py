"""Read a checkpoint of DCP, checksums included: torch writes them, and does not look at them."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    DefaultLoadPlanner,
    FileSystemReader,
    LoadPlan,
    LoadPlanner,
)
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future


def read_into(
    state: dict[str, Any], folder: Path, *, alone: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Fill a state with what a checkpoint holds under the same names.

    Args:
        state: tensors are filled in place, anything else is replaced.
        folder: of the checkpoint.
        alone: whether only this rank reads.
        group: of the ranks that read together; by default all.

    Raises:
        CheckpointException: something cannot be read, or is not what was written.
    """
    dcp.load(state, storage_reader=_CheckingReader(folder), process_group=group, no_dist=alone)


def needed(state: dict[str, Any], metadata: Metadata) -> Metadata:
    """Of what a checkpoint holds, that which `read_into` would read on this rank."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, metadata)
    indices = {item.storage_index for item in planner.create_local_plan().items}
    stored = {index: info for index, info in metadata.storage_data.items() if index in indices}
    return dataclasses.replace(metadata, storage_data=stored)


def checked(file: Path, offset: int, length: int) -> io.BytesIO:
    """An entry of a file, which is a zip archive as `torch.save` makes them.

    Raises:
        BadZipFile: it is not what was written.
    """
    with file.open("rb") as stream:
        stream.seek(offset)
        content = io.BytesIO(stream.read(length))
    with zipfile.ZipFile(content) as archive:
        if archive.testzip() is not None:
            raise zipfile.BadZipFile("its checksum is wrong: bytes were changed since it was saved")
    content.seek(0)
    return content


class _CheckingReader(FileSystemReader):
    """Looks at checksums of all that this rank needs before it reads any of it."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        entries = [self.storage_data[item.storage_index] for item in plan.items]
        # Several items may be rows of one entry.
        for file, offset, length in sorted(
            {(e.relative_path, e.offset, e.length) for e in entries}
        ):
            checked(Path(self.path, file), offset, length)
        return cast("Future[None]", super().read_data(plan, planner))
