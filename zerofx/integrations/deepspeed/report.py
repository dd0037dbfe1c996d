"""What DeepSpeed prints while it trains: a line every few steps, and where time went."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zerofx.integrations.deepspeed.monitors import open_monitor
from zerofx.runtime.loss_scale import FixedScaler, GradScaler

_MIB = 1 << 20


class StepReport:
    """Lines of `steps_per_print`, with times if `wall_clock_breakdown` asks for them.

    Args:
        optimizer: whose learning rates are shown.
        scaler: which knows of skipped steps.
        every: steps between two lines; 0: none, or one each step if times are asked for.
        timed: whether to take times. Devices are waited for then, which slows training down.
        weighed: whether to show memory: what a GPU has allocated, and most of it so far; else the
            most that the process ever had resident.
        monitors: names and parameters of monitors that rank 0 opens.
        samples: of a step, over all ranks; monitors count in them.
        write: where rank 0's lines go.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scaler: FixedScaler,
        *,
        every: int = 0,
        timed: bool = False,
        weighed: bool = False,
        monitors: Iterable[tuple[str, Mapping[str, Any]]] = (),
        samples: int = 1,
        write: Callable[[str], None] = print,
    ) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self._every = every or int(timed or weighed)
        self._timed, self._weighed = timed, weighed
        self._write_line = write
        self._samples = samples
        self._speaks = not dist.is_initialized() or dist.get_rank() == 0
        self._monitors = [open_monitor(*each) for each in monitors] if self._speaks else []
        self._seconds: dict[str, float] = {}
        self._steps = self._skipped = 0

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time inside to a part of the step, such as "forward"."""
        if not self._timed:
            yield
            return
        start = _now()
        yield
        self._seconds[part] = self._seconds.get(part, 0.0) + _now() - start

    def step(self, loss: float | None = None) -> None:
        """An optimizer step was taken, or skipped.

        Args:
            loss: for monitors.
        """
        self._steps += 1
        self._skipped += self._scaler.skipped
        self._tell_monitors(loss)
        if self._every and self._steps % self._every == 0:
            self.write(self._line())
            self._seconds.clear()

    def write(self, text: str) -> None:
        """Show text, on rank 0."""
        if self._speaks:
            self._write_line(text)

    def _tell_monitors(self, loss: float | None) -> None:
        figures = {"lr": float(self._optimizer.param_groups[0]["lr"]), "train_loss": loss}
        if self._monitors and isinstance(self._scaler, GradScaler):
            figures["loss_scale"] = self._scaler.get_scale()
        for write in self._monitors:
            for name, value in figures.items():
                if value is not None:
                    write(f"Train/Samples/{name}", value, self._steps * self._samples)

    def _line(self) -> str:
        rates = ", ".join(f"{group['lr']:.6g}" for group in self._optimizer.param_groups)
        parts = [f"step={self._steps}", f"skipped={self._skipped}", f"lr=[{rates}]"]
        if isinstance(self._scaler, GradScaler):
            parts.append(f"scale={self._scaler.get_scale():g}")
        parts += [
            f"{part}={1000 * spent / self._every:.2f} ms" for part, spent in self._seconds.items()
        ]
        return ", ".join([*parts, *(_memory() if self._weighed else ())])


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory() -> list[str]:
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return [f"allocated={now / _MIB:.0f} MiB", f"peak={most / _MIB:.0f} MiB"]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [f"peak={most / _MIB:.0f} MiB"]
