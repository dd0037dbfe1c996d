"""What DeepSpeed prints while it trains: lines, where time went, and tables."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from zerofx.integrations.deepspeed.clock import now
from zerofx.integrations.deepspeed.comms import CommsOptions, CommsReport
from zerofx.integrations.deepspeed.flops import FlopsOptions, FlopsReport
from zerofx.integrations.deepspeed.monitors import open_monitor
from zerofx.runtime.loss_scale import FixedScaler, GradScaler

_MIB = 1 << 20


class StepReport:
    """Lines of `steps_per_print`, with times if `wall_clock_breakdown` asks for them.

    Args:
        optimizer: whose learning rates are shown.
        scaler: which knows of skipped steps.
        every: steps between two lines; 0: none, or one each step if times, memory or communication
            are asked for.
        timed: whether to take times. Devices are waited for then, which slows training down.
        weighed: whether to show memory: what a GPU has allocated, and most of it so far; else the
            most that the process ever had resident.
        monitors: names and parameters of monitors that rank 0 opens.
        samples: of a step, over all ranks; monitors count in them.
        flops: of which step to show operations.
        comms: whose communication to show in the steps that have a line.
        accumulation: micro-batches of a step.
        steps: taken before, by a run that this one resumes.
        write: where rank 0's lines go.

    Raises:
        ConfigError: there is no folder for the file of `flops`.
        MissingPackageError: the package of a monitor is not installed.
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
        flops: FlopsOptions | None = None,
        comms: CommsOptions | None = None,
        accumulation: int = 1,
        steps: int = 0,
        write: Callable[[str], None] = print,
    ) -> None:
        self._optimizer, self._scaler = optimizer, scaler
        self._every = every or int(timed or weighed or comms is not None)
        self._timed, self._weighed = timed, weighed
        self._write_line = write
        self._samples = samples
        self._speaks = not dist.is_initialized() or dist.get_rank() == 0
        self._monitors = [open_monitor(*each) for each in monitors] if self._speaks else []
        self._flops = self._comms = None
        if flops is not None and self._speaks:
            self._flops = FlopsReport(flops, optimizer, accumulation, write)
        if comms is not None and self._speaks:
            self._comms = CommsReport(comms, self._every, write)
        self._seconds: dict[str, float] = {}
        self._steps = self._last_line = steps
        self._skipped = 0

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time inside to a part of the step, such as "forward"."""
        flops = self._flops if self._flops and self._flops.times(self._steps) else None
        if not self._timed and flops is None:
            yield
            return
        start = now()
        yield
        spent = now() - start
        if self._timed:
            self._seconds[part] = self._seconds.get(part, 0.0) + spent
        if flops is not None:
            flops.add(part, spent)

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
            self._last_line = self._steps
        self._tables()

    def close(self) -> None:
        """Stop what records the step that was begun; without this call, when the report goes."""
        if self._comms is not None:
            self._comms.close()

    def write(self, text: str) -> None:
        """Show text, on rank 0."""
        if self._speaks:
            self._write_line(text)

    def _tables(self) -> None:
        """What a step is timed for comes first, for to read and start a recording takes time."""
        if self._flops is not None:
            self._flops.show(self._steps)
        if self._comms is not None:
            self._comms.step(self._steps)
        if self._flops is not None:
            self._flops.begin(self._steps)

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
        count = self._steps - self._last_line
        parts += [f"{part}={1000 * spent / count:.2f} ms" for part, spent in self._seconds.items()]
        return ", ".join([*parts, *(_memory() if self._weighed else ())])


def _memory() -> list[str]:
    if torch.cuda.is_available():
        now, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
        return [f"allocated={now / _MIB:.0f} MiB", f"peak={most / _MIB:.0f} MiB"]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return [f"peak={most / _MIB:.0f} MiB"]
