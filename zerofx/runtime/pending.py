"""`Pending`: a collective under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_TAKEN = torch.empty(0)

Step = Callable[[list[Tensor]], "list[Tensor] | Pending"]
"""What follows a wait, given the values so far: new values, or a collective to wait for."""


@dataclasses.dataclass
class Pending:
    """A collective under way, which moves one value for each member of a bucket.

    Attributes:
        values: the results, once all steps ran.
        works: what to wait for next.
        keep: tensors that must stay alive until then.
        steps: what follows, in order.
        is_short: whether the first wait is so short that what follows had better start at once.
    """

    values: list[Tensor]
    works: Sequence[Any] = ()
    keep: tuple[Tensor, ...] = ()
    steps: tuple[Step, ...] = ()
    is_short: bool = False

    @property
    def done(self) -> bool:
        """Whether `values` are the results."""
        return not self.works and not self.steps

    def take(self, member: int) -> Tensor:
        """The value of a member, which the caller alone holds from here on."""
        value, self.values[member] = self.values[member], _TAKEN
        return value

    def then(self, step: Step) -> Pending:
        """Append a step; returns itself."""
        self.steps = (*self.steps, step)
        return self

    def advance(self, wait: Callable[[Any], None]) -> None:
        """Wait for what is under way, and go on to the next thing to wait for, or to the end."""
        for work in self.works:
            wait(work)
        self.works, self.keep = (), ()
        while self.steps and not self.works:
            step, *rest = self.steps
            self.steps = tuple(rest)
            result = step(self.values)
            # Only the steps that are left may keep memory alive.
            del step
            if isinstance(result, Pending):
                self.values, self.works, self.keep = result.values, result.works, result.keep
                self.steps = (*result.steps, *self.steps)
            else:
                self.values = result
