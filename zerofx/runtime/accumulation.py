"""When gradients are exchanged: after each backward, or once for several."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from zerofx.errors import UnreducedGradientError, UnsupportedError
from zerofx.runtime.ownership import states_of
from zerofx.runtime.params import ParamState
from zerofx.runtime.pending import Pending
from zerofx.torch_private import (
    adds_to_grad,
    backward_id,
    call_after_backward,
    inside_reentrant_checkpoint,
)

Held = Literal["gradients", "means", "nothing"]
"""Full gradients (stages 0 and 1); means over the shard axis, which replicas have not shared yet
(stages 2 and 3 on a hybrid mesh); nothing (stages 2 and 3)."""


class Accumulation:
    """Counts backwards, and says which of them hold gradients back.

    Those that add nothing to `.grad` (`torch.autograd.grad`) exchange what they find, and do not
    count.

    Attributes:
        held: what a backward that is not the last of its step holds back.
        begun: how many backwards there were.

    Args:
        held: see there.
        per_step: backwards per optimizer step.
    """

    def __init__(self, held: Held, per_step: int) -> None:
        self.held: Held = held
        self._per_step = per_step
        self._no_sync_depth = 0
        self._since_exchange = 0
        self._backward = -1
        self._counts = True
        self.begun = 0

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Hold gradients back; see `zerofx.no_sync`."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def add_up(
        self,
        what: Held,
        grads: Sequence[Tensor],
        states: Sequence[ParamState | None],
        like: Sequence[Tensor],
    ) -> tuple[Sequence[Tensor], Pending | None]:
        """Add `what` to local sums, or in the last backward of a step the sums to it.

        Args:
            what: the gradients are.
            grads: of this backward.
            states: of their parameters.
            like: results have these shapes and dtypes.

        Returns:
            What there is to exchange; or, where it is held back, zeros that stand for the results.
        """
        if what != self.held:
            return grads, None
        waits = self._unfinished()
        if not waits and all(state is None or state.local_sum.value is None for state in states):
            return grads, None
        # Not those to whose `.grad` this backward adds nothing.
        sums = [s.local_sum if s is not None and adds_to_grad(s.param) else None for s in states]
        if waits and any(sums):
            for total, grad in zip(sums, grads, strict=True):
                if total is not None:
                    total.add(grad)
            return grads, Pending([torch.zeros_like(result) for result in like])
        taken = [None if total is None else total.take() for total in sums]
        pairs = zip(taken, grads, strict=True)
        return [grad if total is None else total.add_(grad) for total, grad in pairs], None

    def continues(self) -> bool:
        """Whether a backward has ended that was not the last of its step."""
        return self._since_exchange > (self._backward != -1 and self._counts)

    def _unfinished(self) -> bool:
        return self._no_sync_depth > 0 or self._since_exchange < self._per_step

    def enter(self, states: Sequence[ParamState], leave: Callable[[], None]) -> None:
        """Open the backward pass under way, unless it is open; `leave` runs when it ends.

        Raises:
            UnsupportedError: backwards are counted, and this one runs inside another.
        """
        current = backward_id()
        if current == self._backward:
            return
        if self._per_step > 1 and self.held != "nothing" and inside_reentrant_checkpoint():
            raise UnsupportedError(
                f"a region checkpointed with use_reentrant=True runs a backward of its own, so "
                f"that accumulate={self._per_step} cannot count backwards",
                "checkpoint with use_reentrant=False, or hold gradients back with zerofx.no_sync",
            )
        if self._backward != -1:
            self._since_exchange -= self._counts  # an exception ended the one before
        self._backward, self.begun = current, self.begun + 1
        _drop_cleared(states)
        # All was cleared; or an exception ended the last one of a step after it took what was held.
        if self.held != "nothing" and all(state.local_sum.value is None for state in states):
            self._since_exchange = 0
        self._counts = any(adds_to_grad(state.param) for state in states)
        self._since_exchange += self._counts
        call_after_backward(leave)

    def leave(self) -> bool:
        """Close the backward pass.

        Returns:
            Whether gradients were exchanged.
        """
        self._backward = -1
        exchanged = self._counts and not self._unfinished()
        if exchanged:
            self._since_exchange = 0
        return exchanged or self.held == "nothing"

    def stepped(self) -> None:
        """The optimizer used the gradients: the next backward is the first of its step."""
        if self._backward == -1:  # one that steps in a backward uses what that exchanges
            self._since_exchange = 0

    @contextlib.contextmanager
    def set_aside(self, states: Sequence[ParamState]) -> Iterator[None]:
        """Inside the block nothing is held back; afterwards the accumulation goes on as before.

        For a step that applies nothing, and leaves gradients as they are.
        """
        count, sums = self._since_exchange, [state.local_sum.take() for state in states]
        try:
            yield
        finally:
            self._since_exchange = count
            for state, held in zip(states, sums, strict=True):
                state.local_sum.value = held

    def refuse_pending(self, states: Sequence[ParamState], stepped: Iterable[Tensor]) -> None:
        """Raise if an optimizer is about to step over gradients that were held back.

        Args:
            states: all parameters.
            stepped: the parameters that the optimizer updates.

        Raises:
            UnreducedGradientError: names them.
        """
        mine = states_of(stepped, states)
        if mine:
            _drop_cleared(states)
        held = [state.spec.name for state in mine if state.local_sum.value is not None]
        if held:
            raise UnreducedGradientError(
                "an optimizer steps while gradients are held back by no_sync or accumulate",
                "run the last backward of the accumulation outside no_sync, and step once per "
                "`accumulate` backwards; where a step may have fewer, as the last of an epoch, "
                "leave that option out and use zerofx.no_sync",
                held,
            )


def _drop_cleared(states: Sequence[ParamState]) -> None:
    """Forget local sums whose `.grad` the user cleared."""
    for state in states:
        if state.local_sum.value is not None:
            state.local_sum.drop_if_cleared()
