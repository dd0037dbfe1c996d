"""Paths of files that a user names."""

from __future__ import annotations

import os
import re
from pathlib import Path

from zerofx.errors import CheckpointError

_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)  # `Path` makes one slash of two


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of this machine's file systems, as it was given.

    Raises:
        CheckpointError: it is a URL, which would name a folder `s3:` here.
    """
    if _URL.match(os.fspath(path)):
        raise CheckpointError(
            f"{path} is a URL, and zerofx reads and writes folders of mounted file systems",
            "mount it, and give the path of its folder there; or write to a disk and copy; or "
            "use torch.distributed.checkpoint.save(state, checkpoint_id=url) and load, which "
            "take URLs where fsspec is installed",
        )
    return Path(path)
