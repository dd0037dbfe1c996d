"""Accelerate's optimizer and scheduler, which do what a file of DeepSpeed asks for in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer

from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.runtime.params import params_of


class RecipeOptimizer(AcceleratedOptimizer):
    """Checks gradients, and completes those of a model in parts, before it steps.

    Args:
        optimizer: torch's.
        recipe: what the file asks for.
        after: called after each step, taken or skipped.
        kwargs: Accelerate's.
    """

    def __init__(
        self, optimizer: Optimizer, recipe: Recipe, after: Callable[[], None], **kwargs: Any
    ) -> None:
        super().__init__(optimizer, **kwargs)
        self._recipe, self._after, self._complete = recipe, after, False

    def complete_gradients(self) -> None:
        """Once in a step, before gradients are unscaled or clipped."""
        if not self._complete:
            self._recipe.complete_gradients(params_of(self.optimizer), self.scaler)
            self._complete = True

    def step(self, closure: Any = None) -> None:
        """As Accelerate: only where gradients are those of a whole step."""
        if not self.gradient_state.sync_gradients:
            return
        self._recipe.check_gradients(self.optimizer)
        self.complete_gradients()
        super().step(closure)
        self._complete = False
        self._after()


class GroupScheduler(AcceleratedScheduler):
    """Goes on by a number in each step, groups of ranks say, as Accelerate's does by all ranks."""

    def __init__(self, scheduler: Any, optimizers: Any, groups: int, with_optimizer: bool) -> None:
        super().__init__(scheduler, optimizers, with_optimizer, split_batches=True)
        self._groups = groups

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As often as there are groups, as far as the schedule reaches."""
        whole = self.step_with_optimizer and self.gradient_state.sync_gradients
        last = getattr(self.scheduler, "total_steps", None)
        for _ in range(self._groups if whole else 1):
            if last is None or self.scheduler.last_epoch < last:
                super().step(*args, **kwargs)
