"""Processes of one machine share the work of compiling."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import TypeVar

from filelock import FileLock, Timeout
from torch._inductor import config as inductor_config
from torch._inductor.codecache import get_lock_dir

Made = TypeVar("Made")


def in_turns(jobs: Mapping[str, Callable[[], Made]]) -> dict[str, Made]:
    """Run compilations which other processes of this machine are likely to run as well.

    Each process begins with those that no other is at. The others' come out of Inductor's cache, in
    a tenth of the time; where that is off, every process compiles everything, beside the others.

    Args:
        jobs: by what they compile, with Inductor: equal texts mean equal results.

    Returns:
        What they made, in the order of `jobs`.
    """
    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return {text: job() for text, job in jobs.items()}
    made: dict[str, Made] = {}
    for text, job in jobs.items():
        if (lock := _acquired(text, 0)) is not None:
            try:
                made[text] = job()
            finally:
                lock.release()
    for text in [text for text in jobs if text not in made]:
        # Waits for the one that is at it, not for those who wait as well: it may have failed.
        if (lock := _acquired(text, inductor_config.file_lock_timeout)) is not None:
            lock.release()
        made[text] = jobs[text]()
    return {text: made[text] for text in jobs}


def _acquired(text: str, seconds: float) -> FileLock | None:
    name = hashlib.sha256(text.encode()).hexdigest()
    lock = FileLock(os.path.join(get_lock_dir(), f"zerofx_{name}.lock"))
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return None
    return lock
