"""Saves under way in a thread, and what is said if one fails."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from zerofx.checkpoint.ranks import Ranks
from zerofx.checkpoint.writer import alone
from zerofx.errors import CheckpointError
from zerofx.runtime.members import leave_idle

_log = logging.getLogger(__name__)

_running: dict[Path, futures.Future[Any]] = {}
"""By the name that each will have."""


class Saving:
    """A save under way."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        future: futures.Future[Any],
        ranks: Ranks,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._path = path
        self._future = future
        self._ranks = ranks
        self._group = group

    def done(self) -> bool:
        """Whether this rank's part is written, or failed: `wait` says which."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until the checkpoint is complete under its name; every rank calls it.

        Raises:
            CheckpointError: a rank could not write.
        """
        try:
            with explained(self._path, self._ranks):
                self._future.result()
        except BaseException:
            # A signal may end the waiting: the save goes on, in this group.
            if self._group is not None and self._future.done():
                dist.destroy_process_group(self._group)
                self._group = None
            raise
        if self._group is not None:
            leave_idle(self._group)
            self._group = None


def note_running(target: Path, future: futures.Future[Any]) -> None:
    """Have `wait_for_running` know of a save to `target`, and log it if it fails."""
    _running[target] = future

    def end(ended: futures.Future[Any]) -> None:
        if _running.get(target) is ended:
            del _running[target]
        if (error := ended.exception()) is not None:
            _log.error("the checkpoint %s could not be written: %s", target, error)

    future.add_done_callback(end)


def wait_for_running(target: Path) -> None:
    """Wait until a thread is done that writes a checkpoint of this name, however it ends."""
    if (future := _running.get(target)) is not None:
        futures.wait([future])


@contextlib.contextmanager
def explained(path: str | os.PathLike[str], ranks: Ranks) -> Iterator[None]:
    """Inside the block, raise what DCP says as an error that names ranks and the remedy."""
    try:
        with alone():
            yield
    except (CheckpointException, CheckpointError) as error:
        reasons = _reasons(error, ranks)
        remedy = "see whether the folder exists, may be written to and has room on each rank's host"
        if any("pickle" in each for each in reasons):
            remedy = "give as `extra` what pickle takes: numbers, state_dict()s, no functions"
        raise CheckpointError(
            f"the checkpoint {path} could not be written", remedy, reasons
        ) from error


def _reasons(error: CheckpointException | CheckpointError, ranks: Ranks) -> list[str]:
    if isinstance(error, CheckpointError):
        return [error.problem]
    # DCP counts along the group.
    numbers = ranks.numbers or (0,)
    return [f"rank {numbers[at]}: {reason}" for at, (reason, _) in error.failures.items()]
