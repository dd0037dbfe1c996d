"""`LocalSum`: what a parameter's gradient lacks until it is exchanged."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.gradients import before_users
from zerofx.runtime.in_place import times_cleared
from zerofx.runtime.parameter import local_tensor


class LocalSum:
    """Local gradients of a parameter, summed while they are not exchanged.

    Meanwhile `.grad` holds what was exchanged before: nobody but `zero_grad` may write to it.

    Attributes:
        value: the sum, if there is one.

    Args:
        param: the sharded parameter.
        name: of the parameter.
    """

    def __init__(self, param: torch.nn.Parameter, name: str) -> None:
        self.value: Tensor | None = None
        self._param = param
        self._name = name
        self._seen: _Mark | None = None
        self._watches = False

    def add(self, grad: Tensor) -> None:
        """Sum a gradient that is not exchanged yet."""
        self._watch()
        if self.value is None:
            self.value = grad.clone(memory_format=torch.contiguous_format)
        else:
            self.value += grad

    def take(self) -> Tensor | None:
        """The sum so far, which the caller now owns."""
        value, self.value = self.value, None
        return value

    def drop_if_cleared(self) -> None:
        """Forget the sum if the user cleared the gradient since the last backward.

        Raises:
            UnsupportedError: the gradient was written to otherwise, or replaced.
        """
        seen, found = self._seen, _mark(self._param.grad)
        if seen is None or found is None:
            self.value = None
            return
        replaced = found.clearings is not seen.clearings
        if not replaced and found.times != seen.times:
            self.value = None
        elif replaced or found.versions != seen.versions:
            raise UnsupportedError(
                "a gradient was written to, or replaced, while it is held back by no_sync or "
                "accumulate: it has not been added up yet",
                "clip, scale and mend gradients after the last backward of a step; to clear them "
                "call zero_grad()",
                [self._name],
            )

    def _watch(self) -> None:
        """Remember `.grad` whenever a backward adds to it."""
        if self._watches:
            return
        self._watches = True
        mine = weakref.ref(self)

        def mark(param: Tensor) -> None:
            if (each := mine()) is not None:
                each._seen = _mark(param.grad)

        before_users(self._param, mark)


class _Mark(NamedTuple):
    """What tells a gradient that was replaced; cleared; and written to otherwise."""

    clearings: list[int]
    times: int
    versions: tuple[int, int]


def _mark(grad: Tensor | None) -> _Mark | None:
    if grad is None:
        return None
    # A list lives as long as who remembers it; an address another tensor may get, on some ranks.
    clearings = times_cleared(grad)
    # An op on the DTensor raises one counter, an edit of the local tensor the other.
    local = local_tensor(grad) if isinstance(grad, DTensor) else grad
    return _Mark(clearings, clearings[0], (grad._version, local._version))
