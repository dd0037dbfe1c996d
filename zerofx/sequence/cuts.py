"""How a value is cut along the sequence, and what becomes of that when it is seen otherwise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerofx.torch_private import shares_storage, tensors_in


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this rank stands among those that share a sequence, or a model.

    Attributes:
        group: name of their process group, so that modules can be copied and pickled.
        rank: in the group.
        size: of the group.
    """

    group: str
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dimension is `outer` blocks; each rank holds its equal share of every block.

    `[batch, sequence, width]` is cut by `Cut(1)`, and flattened to `[batch * sequence, width]` by
    `Cut(0, batch)`.
    """

    dim: int
    outer: int = 1

    def local(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of a rank's part of a whole value."""
        return tuple(n // size if at == self.dim else int(n) for at, n in enumerate(shape))

    def fits(self, shape: Sequence[int], size: int) -> bool:
        """Whether a whole value can be cut so."""
        return shape[self.dim] % (self.outer * size) == 0


def through_reshape(cut: Cut, before: Sequence[int], after: Sequence[int], size: int) -> Cut | None:
    """The same elements in another shape: in row-major order a cut is blocks of equal pieces."""
    blocks = math.prod(before[: cut.dim]) * cut.outer
    for dim in range(len(after)):
        above = math.prod(after[:dim])
        if blocks % above == 0 and after[dim] > 1:
            found = Cut(dim, blocks // above)
            if found.fits(after, size):
                return found
    return None


def through_view(cut: Cut, whole: Tensor, view: Callable[[Tensor], Any]) -> Cut | None:
    """What becomes of a cut in the results of an operation, if those are views of its operand.

    The operation is run on a tensor of which the cut dimension has the largest stride: a dimension
    of a result that has this stride, and all positions, is the cut one.

    Args:
        cut: of the operand.
        whole: the operand.
        view: the operation.

    Returns:
        `None` if a result is no view, has some positions only, or is cut unlike the others.
    """
    n = whole.shape[cut.dim]
    others = [size for at, size in enumerate(whole.shape) if at != cut.dim]
    stride = math.prod(others)
    probe = torch.empty((n, *others), dtype=whole.dtype, device=whole.device).movedim(0, cut.dim)
    found: set[Cut | None] = set()
    for result in tensors_in(view(probe)):
        kept = shares_storage(result, probe) and result.storage_offset() < max(stride, 1)
        dims = [at for at, step in enumerate(result.stride()) if step == stride]
        dims = [at for at in dims if kept and result.shape[at] == n]
        found.add(Cut(dims[0], cut.outer) if len(dims) == 1 else None)
    return found.pop() if len(found) == 1 else None
