"""Where a run's figures go besides the screen: CSV, TensorBoard, Weights & Biases, Comet."""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerofx.errors import MissingPackageError

Write = Callable[[str, float, int], None]
"""Takes a name, such as `Train/Samples/lr`, a value, and the samples seen so far."""


def open_monitor(kind: str, params: Mapping[str, Any]) -> Write:
    """Start one of `MONITORS`; on rank 0 alone.

    Args:
        kind: name of the section of the file.
        params: its values.

    Raises:
        MissingPackageError: the package that it writes through is not installed.
    """
    return MONITORS[kind](**{key: value for key, value in params.items() if key != "enabled"})


def _csv(output_path: str = "csv_monitor", job_name: str = "DeepSpeedJobName") -> Write:
    """One file a name, a line a step."""
    folder = Path(output_path) / job_name
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, value: float, samples: int) -> None:
        path = folder / f"{name.replace('/', '_')}.csv"
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if new:
                rows.writerow(["step", name.rpartition("/")[2]])
            rows.writerow([samples, value])

    return write


def _tensorboard(output_path: str = "runs", job_name: str = "DeepSpeedJobName") -> Write:
    _need("tensorboard")
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
    board = writer(str(Path(output_path) / job_name))

    def write(name: str, value: float, samples: int) -> None:
        board.add_scalar(name, value, samples)
        board.flush()

    return write


def _wandb(group: str | None = None, team: str | None = None, project: str = "deepspeed") -> Write:
    _need("wandb")
    run = importlib.import_module("wandb").init(project=project, group=group, entity=team)
    return lambda name, value, samples: run.log({name: value}, step=samples)


def _comet(
    samples_log_interval: int = 100, experiment_name: str | None = None, **how: Any
) -> Write:
    _need("comet_ml")
    experiment = importlib.import_module("comet_ml").start(**how)
    if experiment_name is not None:
        experiment.set_name(experiment_name)
    shown: dict[str, int] = {}

    def write(name: str, value: float, samples: int) -> None:
        if name not in shown or samples - shown[name] >= samples_log_interval:
            shown[name] = samples
            experiment.log_metric(name, value, step=samples)

    return write


MONITORS: dict[str, Callable[..., Write]] = {
    "csv_monitor": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "comet": _comet,
}
"""By the names of their sections."""


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise MissingPackageError(
            f"the file enables {package}, which is not installed",
            f"pip install {package}, or leave the section out",
        )
