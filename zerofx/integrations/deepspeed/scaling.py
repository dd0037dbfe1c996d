"""How losses are scaled."""

from __future__ import annotations

import dataclasses

import torch

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.dtypes import autocast_dtype
from zerofx.integrations.deepspeed.settings import Settings
from zerofx.runtime.loss_scale import FixedScaler, GradScaler


@dataclasses.dataclass(frozen=True)
class Scaling:
    """How losses are scaled; see `zerofx.GradScaler`. A scale that is not dynamic stays."""

    enabled: bool
    scale: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0

    def build(self, device: str) -> FixedScaler:
        """The scaler for losses on a type of device."""
        if not self.dynamic:
            return FixedScaler(device, self.scale, enabled=self.enabled)
        return GradScaler(
            device,
            self.scale,
            window=self.window,
            hysteresis=self.hysteresis,
            consecutive_hysteresis=self.consecutive_hysteresis,
            min_scale=self.min_scale,
        )


def scaling_of(settings: Settings, dtype: torch.dtype | None) -> Scaling:
    """What a file says of it, given the dtype of computation.

    Raises:
        ConfigError: a number does not suit a scale that moves.
    """
    if dtype == torch.float16:
        fixed = float(settings.get("fp16.loss_scale", 0))
        if fixed == 0:
            _check_moving(settings)
        return Scaling(
            enabled=True,
            scale=fixed or 2.0 ** settings.get("fp16.initial_scale_power", 16),
            dynamic=fixed == 0,
            window=settings.get("fp16.loss_scale_window", 1000),
            hysteresis=settings.get("fp16.hysteresis", 2),
            consecutive_hysteresis=settings.get("fp16.consecutive_hysteresis", False),
            min_scale=float(settings.get("fp16.min_loss_scale", 1)),
        )
    watched = dtype == torch.bfloat16 and settings.get("bf16.check_grad_overflow", True)
    if autocast_dtype(settings) == torch.float16:
        return Scaling(enabled=True, scale=2.0**16, dynamic=True, window=2000, hysteresis=1)
    return Scaling(enabled=watched)


def _check_moving(settings: Settings) -> None:
    """What a scale that moves cannot do with, by the names of keys."""
    names = ("loss_scale_window", "hysteresis", "min_loss_scale")
    if none := [f"fp16.{name}" for name in names if settings.get(f"fp16.{name}", 1) < 1]:
        raise ConfigError(
            "a loss scale that moves (loss_scale 0) has keys that are 0",
            "write numbers of at least 1",
            none,
        )
