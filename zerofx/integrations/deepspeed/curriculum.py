"""How difficult samples may be at which step, and which samples that lets in."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import CURRICULUM, METRICS
from zerofx.integrations.deepspeed.indexed import read_indexed
from zerofx.integrations.deepspeed.settings import Settings

Pace = Callable[[int], float]
"""The difficulty at a step; the first step is 1."""

Admitted = Callable[[float], NDArray[Any]]
"""The samples that are not more difficult, easy ones first."""

_PACES: dict[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
_CHOICES = {
    "difficulty_type": ("value", "percentile"),
    "clustering_type": ("schedule_based", "single_cluster"),
    "schedule_type": tuple(_PACES),
}


@dataclasses.dataclass(frozen=True)
class Metric:
    """One of `curriculum_metrics`, with DeepSpeed's names."""

    name: str
    min_difficulty: float
    max_difficulty: float
    difficulty_type: str
    clustering_type: str
    schedule_type: str
    schedule_config: Mapping[str, Any]
    index_to_sample_path: str = ""
    index_to_metric_path: str = ""

    @property
    def selects(self) -> bool:
        """Whether it keeps samples away; the others are for programs that read difficulties."""
        return self.clustering_type != "single_cluster"

    def pace(self, step: int) -> float:
        """The difficulty of schedules that a file can describe."""
        given = self.schedule_config
        if self.schedule_type == "fixed_discrete":
            return given["difficulty"][bisect.bisect_left(given["max_step"], step)]
        return paced(
            step / given["total_curriculum_step"],
            self.min_difficulty,
            self.max_difficulty,
            given["difficulty_step"],
            given.get("root_degree", 1),
        )

    def admitted(self, length: int) -> Admitted:
        """Read the index of a data set with so many samples.

        Raises:
            ConfigError: its files are missing or damaged, or it is that of other samples.
        """
        path = f"{METRICS}.{self.name}"
        index = read_indexed(self.index_to_sample_path, f"{path}.index_to_sample_path")
        samples = index.values
        if samples.max() >= length:
            raise ConfigError(
                f"{path}: the index names sample {samples.max()}, the data set has {length}",
                "pass the data set that was analyzed, or analyze this one",
            )
        if self.difficulty_type == "percentile":
            whole, share = self.max_difficulty, len(samples) // self.max_difficulty
            return lambda most: samples[: None if most == whole else int(share * most)]
        metric = read_indexed(self.index_to_metric_path, f"{path}.index_to_metric_path")
        if len(metric.values) != len(index.sizes):
            raise ConfigError(
                f"{path}: {len(metric.values)} difficulties, {len(index.sizes)} lists of samples",
                "name two files that the data analyzer wrote together",
            )
        difficulties = np.repeat(metric.values, index.sizes)
        return lambda most: samples[difficulties <= most]


def paced(share: float, least: float, most: float, multiple: float, degree: float = 1) -> float:
    """A root of the share of steps that are taken, from `least` to `most`, in multiples."""
    reached = math.floor(share ** (1 / degree) * (most - least) + least)
    return min(reached - reached % multiple, most)


def metrics_of(settings: Settings) -> tuple[Metric, ...]:
    """The metrics of a file, none if curriculum learning is not enabled.

    Raises:
        ConfigError: there are none, or keys of one are missing, or make no sense.
    """
    if not settings.get(f"{CURRICULUM}.enabled", False):
        return ()
    found: dict[str, dict[str, Any]] = {}
    for path, value in settings.section(METRICS).items():
        name, _, key = path.partition(".")
        found.setdefault(name, {})[key] = value
    if not found:
        raise ConfigError(f"{CURRICULUM} is enabled without metrics", f"name some in {METRICS}")
    return tuple(_metric(name, given) for name, given in found.items())


def _metric(name: str, given: dict[str, Any]) -> Metric:
    path = f"{METRICS}.{name}"
    own = {key: value for key, value in given.items() if "." not in key}
    pace = _pace_settings(given)
    needed = ["min_difficulty", "max_difficulty", *_CHOICES]
    if own.get("clustering_type") != "single_cluster":
        needed.append("index_to_sample_path")
        if own.get("difficulty_type") != "percentile":
            needed.append("index_to_metric_path")
    absent = [f"{path}.{key}" for key in needed if key not in own]
    if absent:
        raise ConfigError("a metric of curriculum learning lacks keys", "write them", absent)
    for key, choices in _CHOICES.items():
        if own[key] not in choices:
            raise ConfigError(f"{path}.{key} is {own[key]!r}", f"use one of {', '.join(choices)}")
    _check_difficulties(path, own)
    _check_pace(path, own["schedule_type"], pace)
    return Metric(name=name, schedule_config=pace, **own)


def _pace_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """What is below `schedule_config`."""
    start = "schedule_config."
    return {k.removeprefix(start): v for k, v in given.items() if k.startswith(start)}


def _check_difficulties(path: str, own: Mapping[str, Any]) -> None:
    for key in ("min_difficulty", "max_difficulty"):
        if not isinstance(own[key], int | float) or isinstance(own[key], bool):
            raise ConfigError(f"{path}.{key} is {own[key]!r}", "write a number")
    least, most = own["min_difficulty"], own["max_difficulty"]
    if least > most:
        raise ConfigError(
            f"{path}.min_difficulty is {least}, max_difficulty {most}", "exchange them"
        )
    if own["difficulty_type"] == "percentile" and not 0 <= least <= most != 0:
        raise ConfigError(
            f"{path}: percentiles from {least} to {most}", "use numbers from 0 up, as 1 and 100"
        )


def _check_pace(path: str, kind: str, pace: Mapping[str, Any]) -> None:
    wanted = _PACES[kind]
    if set(pace) != set(wanted):
        raise ConfigError(
            f"{path}.schedule_config does not fit {kind}",
            f"it has {', '.join(wanted) or 'no settings: pass a function to make_sampler'}",
            sorted(f"{path}.schedule_config.{key}" for key in set(pace) ^ set(wanted)),
        )
    for key, value in pace.items():
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"{path}.schedule_config.{key} is {value}", "use a positive number")
    if kind == "fixed_discrete":
        difficulties, last = pace["difficulty"], pace["max_step"]
        if len(difficulties) != len(last) + 1 or not last or sorted(last) != last:
            raise ConfigError(
                f"{path}.schedule_config: difficulties {difficulties} with max_step {last}",
                "give rising steps, one less than difficulties: the last one has no end",
            )
