"""Memory that a process of CPUs frees and takes again in every step.

glibc gives the end of its heap back to the operating system whenever enough of it is free, as at
the end of each step. The system then maps and clears the same pages anew in the next one: ten
thousand page faults a step, and 7 % of the processor time of a small GPT. GPUs have a caching
allocator for this; here glibc is told to be one.
"""

from __future__ import annotations

import ctypes
import functools

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_NEVER = -1
_LARGEST = 32 << 20  # glibc takes no larger threshold
_GROWTH = 64 << 20


@functools.cache
def keep_freed_memory() -> bool:
    """Let glibc keep what this process frees, from now on and whoever frees it.

    What is free now goes back to the system first: the full values of a model that was sharded.
    Blocks above 32 MiB stay as they were, each mapped and unmapped on its own.

    Returns:
        Whether there is a glibc, and it agreed.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    libc.malloc_trim(0)
    settings = {_TRIM_THRESHOLD: _NEVER, _MMAP_THRESHOLD: _LARGEST, _TOP_PAD: _GROWTH}
    return all(libc.mallopt(name, value) for name, value in settings.items())
