"""Learning rates as functions of the step: the five schedules of DeepSpeed.

They count steps from -1, the time before the first one, as DeepSpeed does; so the first two steps
of a warm-up run at the lowest rate. All rates are absolute: those of the optimizer's groups are
replaced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from zerofx.errors import ConfigError

PerGroup = float | Sequence[float]
"""One value for all parameter groups of an optimizer, or one for each."""

Warmup = Literal["log", "linear"]


class Shape(Protocol):
    """A schedule without an optimizer: a frozen dataclass with DeepSpeed's names."""

    def lr(self, step: int, group: int, initial: float) -> float:
        """The rate of a parameter group.

        Args:
            step: optimizer steps taken, less one; -1 before the first.
            group: its index.
            initial: the group's rate when the schedule was made.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Constant(Shape):
    """The optimizer's rates as they are; for `factors`."""

    def lr(self, step: int, group: int, initial: float) -> float:
        return initial


@dataclasses.dataclass(frozen=True)
class WarmupLR(Shape):
    """From `warmup_min_lr` up to `warmup_max_lr` (by default the optimizer's), then flat."""

    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None
    warmup_num_steps: int = 1000
    warmup_type: Warmup = "log"

    def lr(self, step: int, group: int, initial: float) -> float:
        least = _of(self.warmup_min_lr, group)
        most = initial if self.warmup_max_lr is None else _of(self.warmup_max_lr, group)
        return least + (most - least) * self._ratio(step)

    def _ratio(self, step: int) -> float:
        warm = _warm(step, self.warmup_num_steps, self.warmup_type)
        return 1.0 if warm is None else warm


@dataclasses.dataclass(frozen=True)
class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then down to zero in a straight line that ends at `total_num_steps`."""

    warmup_max_lr: PerGroup | None = 0.001
    total_num_steps: int = dataclasses.field(kw_only=True)

    def _ratio(self, step: int) -> float:
        warm = _warm(step, self.warmup_num_steps, self.warmup_type)
        if warm is not None:
            return warm
        rest = max(1.0, self.total_num_steps - max(2, self.warmup_num_steps))
        return max(0.0, (self.total_num_steps - step) / rest)


@dataclasses.dataclass(frozen=True)
class WarmupCosineLR(Shape):
    """The optimizer's rate times a ratio: up to 1, then a cosine down to `cos_min_ratio`."""

    total_num_steps: int
    warmup_min_ratio: float = 0.0
    warmup_num_steps: int = 1000
    cos_min_ratio: float = 0.0001
    warmup_type: Warmup = "log"

    def lr(self, step: int, group: int, initial: float) -> float:
        return 0.0 if step < 0 else initial * self._ratio(step)

    def _ratio(self, step: int) -> float:
        warm = _warm(step, self.warmup_num_steps, self.warmup_type)
        if warm is not None:
            return self.warmup_min_ratio + warm * (1.0 - self.warmup_min_ratio)
        first = max(2, self.warmup_num_steps)
        done = min(1.0, (step - first + 1) / max(1, self.total_num_steps - first))
        cosine = (1 + math.cos(math.pi * done)) / 2
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


@dataclasses.dataclass(frozen=True)
class OneCycle(Shape):
    """Up, down, then decay; Adam's first beta goes the other way (its second is 0.99 meanwhile)."""

    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: float = 0.0
    cycle_first_step_size: float = 2000
    cycle_second_step_size: float | None = None
    cycle_first_stair_count: int = 0
    cycle_second_stair_count: int | None = None
    decay_step_size: float = 0
    cycle_momentum: bool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: float = 0.0

    def lr(self, step: int, group: int, initial: float) -> float:
        least, most = _of(self.cycle_min_lr, group), _of(self.cycle_max_lr, group)
        if step < 0:
            return least
        if step < self._length:
            return least + (most - least) * self._height(step)
        return least / (1 + self.decay_lr_rate * self._decays(step))

    def beta(self, step: int, group: int) -> float:
        """Adam's first beta."""
        least, most = _of(self.cycle_min_mom, group), _of(self.cycle_max_mom, group)
        if step < 0:
            return least
        if step < self._length:
            return most - (most - least) * self._height(step)
        return most * (1 + self.decay_mom_rate * self._decays(step))

    @property
    def _halves(self) -> tuple[float, float]:
        first, second = self.cycle_first_step_size, self.cycle_second_step_size
        return float(first), float(first if second is None else second)

    @property
    def _length(self) -> float:
        return sum(self._halves)

    def _decays(self, step: int) -> float:
        """How often the rate has decayed since the cycle."""
        if self.decay_step_size == 0:
            return 0.0
        return (step - self._length + 1) / self.decay_step_size

    def _height(self, step: int) -> float:
        """Where the cycle is, from 0 to 1."""
        first, second = self._halves
        position = (step + 1) % self._length
        rising = position <= first
        stairs = self.cycle_first_stair_count
        if not rising and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        way, length = (position, first) if rising else (self._length - position, second)
        return math.floor(way * stairs / length) / stairs if stairs else way / length


@dataclasses.dataclass(frozen=True)
class LRRangeTest(Shape):
    """A rate that only rises, to find the largest that works."""

    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: int = 2000
    lr_range_test_step_rate: float = 1.0
    lr_range_test_staircase: bool = False

    def lr(self, step: int, group: int, initial: float) -> float:
        interval = (step + 1) / self.lr_range_test_step_size
        rises = math.floor(interval) if self.lr_range_test_staircase else interval
        return _of(self.lr_range_test_min_lr, group) * (1 + self.lr_range_test_step_rate * rises)


SHAPES: dict[str, type[Shape]] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
"""By DeepSpeed's names."""


class Schedule(LRScheduler):
    """A shape at work on an optimizer: a torch scheduler like any other.

    `state_dict` holds numbers only, so that a checkpoint may carry it.

    Args:
        optimizer: whose rates it sets.
        shape: the schedule.
        last_step: optimizer steps taken, less one. If there are any, as in DeepSpeed, rates and
            betas stay as they are until the next one.
        factors: what rates of steps are multiplied by, in turn.

    Raises:
        ConfigError: the optimizer has no betas that a momentum cycle could turn, or a list of
            rates has not as many entries as there are parameter groups.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shape: Shape,
        last_step: int = -1,
        factors: Sequence[float] = (1.0,),
    ) -> None:
        self._shape, self._factors = shape, factors
        self._cycle = shape if isinstance(shape, OneCycle) and shape.cycle_momentum else None
        _check(optimizer, shape, self._cycle)
        before = [(float(group["lr"]), group.get("betas")) for group in optimizer.param_groups]
        super().__init__(optimizer)
        if last_step >= 0:
            self.last_epoch = last_step + 1
            for group, (rate, betas) in zip(optimizer.param_groups, before, strict=True):
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
                if betas is not None:
                    group["betas"] = betas
            self._last_lr = [rate for rate, _ in before]

    def get_lr(self) -> list[float | Tensor]:
        """The rates of all groups; torch calls it."""
        step, factor = self.last_epoch - 1, self._factors[self.last_epoch % len(self._factors)]
        return [factor * self._shape.lr(step, i, float(lr)) for i, lr in enumerate(self.base_lrs)]

    def step(self, epoch: int | None = None) -> None:
        """Go on by one optimizer step that was not skipped."""
        super().step(epoch)
        if self._cycle is not None:
            for index, group in enumerate(self.optimizer.param_groups):
                group["betas"] = (self._cycle.beta(self.last_epoch - 1, index), 0.99)

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key not in _NOT_STATE}


_NOT_STATE = ("_shape", "_cycle", "_factors")


def _check(optimizer: Optimizer, shape: Shape, cycle: OneCycle | None) -> None:
    if cycle is not None and "betas" not in optimizer.defaults:
        raise ConfigError(
            f"OneCycle cycles momentum through betas, which {type(optimizer).__name__} has not",
            'say "cycle_momentum": false, or use Adam or AdamW',
        )
    groups = len(optimizer.param_groups)
    for name, value in vars(shape).items():
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) != groups:
            raise ConfigError(
                f"scheduler parameter {name} has {len(value)} values for {groups} parameter groups",
                "give one number, or one for each group",
            )


def _of(value: PerGroup, group: int) -> float:
    return value[group] if isinstance(value, Sequence) else value


def _warm(step: int, num_steps: int, kind: Warmup) -> float | None:
    """How far a warm-up is, from 0 to 1; `None` after it."""
    length = max(2, num_steps)
    if step < 0:
        return 0.0
    if step >= length:
        return None
    return step / length if kind == "linear" else math.log(step + 1) / math.log(length)
