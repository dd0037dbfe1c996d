"""Full values that a forward left for its backward."""

from __future__ import annotations

import torch
from torch import Tensor

from zerofx.runtime.gathered import GatheredMemory
from zerofx.runtime.params import ParamState


class KeptValues:
    """Values kept instead of freed, by parameter, oldest first.

    All ranks keep and drop the same ones, since what decides is the order of programs and whether
    a parameter was edited.

    Args:
        gathered: counts their memory.
        budget: bytes that several graphs of one forward may keep together.
    """

    def __init__(self, gathered: GatheredMemory, budget: int) -> None:
        self._gathered = gathered
        self._budget = budget
        self._values: dict[int, tuple[Tensor, tuple[int, int, int]]] = {}

    def make_room(self, num_bytes: int) -> None:
        """A forward begins that keeps `num_bytes`: what others kept goes, until all fits.

        A program's own last bucket costs nothing at the peak, the last one of another does.
        """
        total = num_bytes + sum(full.nbytes for full, _ in self._values.values())
        while self._values and total > self._budget:
            oldest, _ = self._values.pop(next(iter(self._values)))
            self._gathered.give_back(oldest)
            total -= oldest.nbytes

    def put(self, state: ParamState, full: Tensor) -> None:
        """Keep `full`, the value of `state`'s parameter as it is now."""
        self.drop(state)
        self._values[state.spec.index] = full.reshape(-1), state.versions()

    def take(self, state: ParamState, dtype: torch.dtype) -> Tensor | None:
        """The kept value, 1-D, which the caller now frees.

        Returns:
            `None` if it is out of date or has another dtype.
        """
        full, versions = self._values.get(state.spec.index, (None, None))
        if full is None or full.dtype is not dtype or versions != state.versions():
            self.drop(state)
            return None
        del self._values[state.spec.index]
        return full

    def drop(self, state: ParamState) -> None:
        """Give the memory of a kept value back."""
        full, _ = self._values.pop(state.spec.index, (None, None))
        if full is not None:
            self._gathered.give_back(full)
