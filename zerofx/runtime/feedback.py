"""What coding took from gradients, kept on this rank for the next time (LoCo, arXiv 2407.04480)."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from zerofx.ir.kernels import TensorSpec
from zerofx.runtime.params import ParamState

Shapes = tuple[tuple[TensorSpec, ...], ...]
"""Of each hop, the errors of its kernel; none without feedback."""

Errors = tuple[tuple[Tensor, ...], ...]
"""Of each hop, what its kernel adds to the numbers before it codes them, and renews."""

RESET_AFTER = 1024
"""Reductions of a bucket after which its errors begin at zero again, as LoCo's do."""

FORGET_AFTER = 64
"""Backward passes that did not reduce a bucket after which its memory is given up."""


@dataclasses.dataclass
class _Kept:
    """Errors of one bucket, how often they were used, and in which backward the last time."""

    errors: Errors
    uses: int = 0
    last: int = 0


class CodingErrors:
    """Errors of each bucket of gradients, by its parameters; programs with equal buckets share.

    They belong to gradients, not to weights: an edit of a parameter leaves them alone. Each rank
    has its own, and nothing of it is in a checkpoint.
    """

    def __init__(self) -> None:
        self._buckets: dict[tuple[object, ...], _Kept] = {}
        self._backwards = 0

    def of(
        self, states: Sequence[ParamState | None], shapes: Shapes, device: torch.device
    ) -> Errors:
        """The errors that the next reduction of a bucket adds and renews; zeros at first.

        Args:
            states: its parameters, in order.
            shapes: of the errors of its kernels.
            device: of the gradients.
        """
        if not any(shapes):
            return tuple(() for _ in shapes)
        # Not by their numbers, which go to parameters that take the place of others.
        members = tuple(weakref.ref(state) if state is not None else None for state in states)
        bucket = members, shapes, device
        kept = self._buckets.get(bucket)
        if kept is None or kept.uses == RESET_AFTER:
            kept = _Kept(tuple(tuple(_zeros(each, device) for each in hop) for hop in shapes))
            self._buckets[bucket] = kept
        kept.uses, kept.last = kept.uses + 1, self._backwards
        return kept.errors

    def clear(self) -> None:
        """Begin at zero everywhere, and give up the memory."""
        self._buckets.clear()

    def backward_ended(self) -> None:
        """Give up the memory of buckets that no program makes any more."""
        self._backwards += 1
        oldest = self._backwards - FORGET_AFTER
        self._buckets = {key: kept for key, kept in self._buckets.items() if kept.last >= oldest}


def _zeros(spec: TensorSpec, device: torch.device) -> Tensor:
    shape, dtype = spec
    return torch.zeros(shape, dtype=dtype, device=device)
