"""What is live while each node of a program runs, as rows of bytes."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Curve:
    """What is live while each node of a program runs; parameters at rest are not in it.

    Attributes:
        nodes: of what computes, in order, each twice: while it runs, and until the next one does,
            communication included: one maximum of both would not be affine in the batch.
        blocks: of each, the block of the model that is being computed: `layers.3`, or empty.
        live: a row each: bytes of activations and inputs, of full and reduced gradients, of
            collectives under way, and of gathered values; int64 `[nodes, 4]`.
    """

    nodes: tuple[str, ...]
    blocks: tuple[str, ...]
    live: Rows


CUT = "communication"
"""Name of the communication and views before the first kernel."""


def note(points: list[tuple[str, str, Rows]], name: str, block: str, live: Rows) -> None:
    """Add a point; communication and views belong to the one behind the kernel before."""
    now = live.copy()
    if name == CUT and points:
        name, block, before = points.pop()
        now = now if now.sum() > before.sum() else before
    points.append((name, block, now))
