"""Loss scalers: torch's `GradScaler` with the rules of DeepSpeed, alike on all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofx.errors import ConfigError, LossScaleError

_LARGEST = torch.finfo(torch.float32).max


class FixedScaler(torch.amp.GradScaler):
    """A scale that stays; a step over gradients that are not finite is skipped on all ranks.

    With a scale of 1 it only watches, as bf16 asks for.

    Args:
        device: type of the device that the loss is on, `cuda` or `cpu`.
        init_scale: what losses are multiplied by.
        enabled: without it nothing is scaled, checked or skipped.

    Attributes:
        skipped: whether the step before the last `update` was skipped.
    """

    def __init__(
        self, device: str = "cuda", init_scale: float = 1.0, *, enabled: bool = True
    ) -> None:
        super().__init__(device, init_scale, enabled=enabled)
        self.skipped = False

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """As torch's, with the rule of this class for the next scale."""
        before = self.get_scale()
        super().update(new_scale)
        if new_scale is None and self.is_enabled():
            self.skipped = self.get_scale() < before
            super().update(self._next_scale(before))

    def _next_scale(self, scale: float) -> float:
        return scale


class GradScaler(FixedScaler):
    """`torch.amp.GradScaler` with a window, a hysteresis and a minimum.

    The sequence of scales is that of DeepSpeed's `DynamicLossScaler`: the scale doubles after
    `window` clean steps and every `window` further ones, where the first of a run, and the first
    after an overflow, does not count, and is halved at an overflow, once `hysteresis - 1` earlier
    ones have been forgiven.

    Args:
        device: type of the device that the loss is on, `cuda` or `cpu`.
        init_scale: first scale.
        window: clean steps, `loss_scale_window`; `set_growth_interval` changes it.
        hysteresis: overflows that lower the scale once. A scale that grows forgives as many anew.
        consecutive_hysteresis: every clean step does so, not only one that grows.
        min_scale: the scale does not fall below it.
        enabled: without it nothing is scaled, checked or skipped.

    Raises:
        ConfigError: an argument is out of range.
        LossScaleError: (by `update`) an overflow at the lowest scale; all ranks raise it.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        *,
        window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_scale: float = 1.0,
        enabled: bool = True,
    ) -> None:
        for name, value, good in (
            ("window", window, window >= 1),
            ("hysteresis", hysteresis, hysteresis >= 1),
            ("min_scale", min_scale, 0 < min_scale <= init_scale),
        ):
            if not good:
                raise ConfigError(
                    f"{name}={value} does not suit a loss scale that begins at {init_scale}",
                    "use window >= 1, hysteresis >= 1 and 0 < min_scale <= init_scale",
                )
        super().__init__(device, init_scale, enabled=enabled)
        self.set_growth_interval(window)
        self._hysteresis = self._patience = hysteresis
        self._consecutive = consecutive_hysteresis
        self._min_scale = min_scale
        self._clean_steps = -1

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state and {**state, "patience": self._patience, "clean_steps": self._clean_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.is_enabled():
            self._patience = state_dict["patience"]
            self._clean_steps = state_dict["clean_steps"]

    def _next_scale(self, scale: float) -> float:
        if self.skipped:
            self._clean_steps = -1
            return self._lowered(scale)
        self._clean_steps += 1
        grows = self._clean_steps > 0 and self._clean_steps % self.get_growth_interval() == 0
        if grows or self._consecutive:
            self._patience = self._hysteresis
        grown = scale * self.get_growth_factor()
        return grown if grows and grown <= _LARGEST else scale

    def _lowered(self, scale: float) -> float:
        if self._patience > 1:
            self._patience -= 1
            return scale
        if scale <= self._min_scale:
            raise LossScaleError(
                f"gradients overflow at the lowest loss scale, {scale:g}",
                "look for infinite or NaN values in the model or its data, or lower min_scale",
            )
        return max(scale * self.get_backoff_factor(), self._min_scale)
