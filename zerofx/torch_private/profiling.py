"""torch's profiler, of which a process has one at a time."""

from __future__ import annotations

import torch.autograd


def is_profiling() -> bool:
    """Whether one runs; to start a second ends the first, and to stop that crashes the process."""
    return torch.autograd._profiler_enabled()
