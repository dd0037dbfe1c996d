"""`flops_profiler`: what one step computed, and how fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.optim import Optimizer

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.clock import now
from zerofx.integrations.deepspeed.modules import Model, models_of
from zerofx.integrations.deepspeed.operations import CountOperations
from zerofx.integrations.deepspeed.settings import Settings

_SECTION = "flops_profiler"


@dataclasses.dataclass(frozen=True)
class FlopsOptions:
    """What the section asks for.

    Attributes:
        profile_step: steps that are taken before the one that is shown, as in DeepSpeed.
        module_depth: the deepest modules to list; -1: all.
        top_modules: how many classes of modules of each depth.
        detailed: whether to show each module.
        output_file: which the text is added to; empty: it is printed.
        counter: the pass that counts.
    """

    profile_step: int = 1
    module_depth: int = -1
    top_modules: int = 1
    detailed: bool = True
    output_file: str = ""
    counter: CountOperations = dataclasses.field(default_factory=CountOperations)


def flops_options(settings: Settings) -> FlopsOptions | None:
    """The section; `None` if it is not enabled.

    Raises:
        ConfigError: the depth is none.
    """
    given = settings.section(_SECTION)
    if not given.pop("enabled", False):
        return None
    given.pop("recompute_fwd_factor", None)
    depth = given.get("module_depth", -1)
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < -1:
        raise ConfigError(f"{_SECTION}.module_depth is {depth!r}", "write -1 (all), 0, 1, 2, …")
    return FlopsOptions(**given)


class FlopsReport:
    """Takes the time of one step, and shows it beside what its programs compute.

    Args:
        options: which step, and what of it.
        optimizer: of the models that are shown.
        accumulation: micro-batches of a step.
        write: where the text goes, unless to a file.

    Raises:
        ConfigError: the folder of the file is missing.
    """

    def __init__(
        self,
        options: FlopsOptions,
        optimizer: Optimizer,
        accumulation: int,
        write: Callable[[str], None],
    ) -> None:
        self._options, self._optimizer = options, optimizer
        self._accumulation = accumulation
        self._write = _appender(options.output_file) if options.output_file else write
        self._seconds: dict[str, float] = {}
        self._began = now()

    def times(self, taken: int) -> bool:
        """Whether the step after `taken` steps is the one to be shown."""
        return taken == self._options.profile_step

    def add(self, part: str, seconds: float) -> None:
        """A part of that step took some time."""
        self._seconds[part] = self._seconds.get(part, 0.0) + seconds

    def begin(self, taken: int) -> None:
        """The step after so many begins."""
        if self.times(taken):
            self._began = now()

    def show(self, taken: int) -> None:
        """So many steps were taken: write about the last one, if it is the one."""
        if self.times(taken - 1):
            self._write("\n".join(self._lines(taken, now() - self._began)))

    def _lines(self, step: int, seconds: float) -> list[str]:
        options = self._options
        models = models_of(self._optimizer, options.counter.counts)
        if not any((model.forward + model.backward).total() for model in models):
            return [f"operations of step {step}: none, for no program has the recipe's options"]
        lines = [*_heading(step, models), *self._speeds(models, seconds)]
        for model in models:
            lines += ["", *model.classes(options.module_depth, options.top_modules)]
            if options.detailed:
                lines += ["", *model.tree()]
        return lines

    def _speeds(self, models: list[Model], seconds: float) -> list[str]:
        forward = sum(model.forward.total() for model in models)
        backward = sum(model.backward.total() for model in models)
        known = {"forward": forward, "backward": backward}
        lines = [f"{part} of a micro-batch: {count:,} FLOP" for part, count in known.items()]
        whole = f"the step of {self._accumulation} micro-batches"
        known |= dict.fromkeys(("forward and backward", whole), forward + backward)
        for part, spent in {whole: seconds, **self._seconds}.items():
            speed = known.get(part, 0) * self._accumulation / spent / 1e9
            rate = f", {speed:.3f} GFLOP/s" if part in known else ""
            lines.append(f"{part}: {1000 * spent:.2f} ms{rate}")
        return lines


def _heading(step: int, models: list[Model]) -> list[str]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return [
        f"operations of step {step}, on rank 0 of {ranks}",
        f"parameters: {sum(model.numel for model in models):,} elements, "
        f"{sum(model.held for model in models):,} of them on this rank",
    ]


def _appender(path: str) -> Callable[[str], None]:
    folder = Path(path).absolute().parent
    if not folder.is_dir():
        raise ConfigError(f"{_SECTION}.output_file: no folder {folder}", "make it first")

    def write(text: str) -> None:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    return write
