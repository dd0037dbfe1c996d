"""What a `ds_config.json` has a `Trainer` print while it trains."""

from __future__ import annotations

import contextlib
from typing import Any

import transformers
from torch import Tensor

from zerofx.integrations.deepspeed.recipe import Recipe
from zerofx.integrations.deepspeed.report import StepReport
from zerofx.runtime.loss_scale import FixedScaler


class Reports(transformers.TrainerCallback):
    """Lines, times, memory, monitors and the table of keys, as `Recipe.make_report` gives them.

    Args:
        recipe: what the file asks for.
        scaler: the trainer's, which knows of skipped steps.

    Attributes:
        recipe: see above; looked at when training begins.
    """

    def __init__(self, recipe: Recipe, scaler: FixedScaler) -> None:
        self.recipe, self._scaler = recipe, scaler
        self._report: StepReport | None = None
        self._losses: list[Tensor] = []

    def measure(self, part: str) -> contextlib.AbstractContextManager[None]:
        """Add the time inside to a part of the step."""
        return contextlib.nullcontext() if self._report is None else self._report.measure(part)

    def heard(self, loss: Tensor) -> None:
        """The share of a micro-batch in the step's loss."""
        if self.recipe.monitors:
            self._losses.append(loss.detach())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open monitors, and show the table."""
        done = state.global_step
        self._report = self.recipe.make_report(kwargs["optimizer"], self._scaler, steps=done)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Nothing is recorded any more."""
        assert self._report is not None, "training began"
        self._report.close()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A line, and figures for monitors."""
        assert self._report is not None, "training began"
        loss = sum(float(each) for each in self._losses) if self._losses else None
        self._losses.clear()
        self._report.step(loss)
