"""Samples of one optimizer step after the other, drawn among those that a curriculum lets in."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.curriculum import Admitted, Metric, Pace

Difficulties = Mapping[str, float]


@dataclasses.dataclass
class _Cluster:
    """Samples that came in together, drawn in turn; `position` begins again with a shuffle."""

    samples: NDArray[Any]
    position: int = 0

    def take(self, count: int, rng: np.random.Generator) -> list[int]:
        taken: list[int] = []
        while True:
            part = self.samples[self.position : self.position + count - len(taken)]
            self.position += len(part)
            taken += part.tolist()
            if len(taken) == count:
                return taken
            rng.shuffle(self.samples)
            self.position = 0


def draw(
    length: int, metrics: Sequence[Metric], paces: Mapping[str, Pace], size: int, seed: int
) -> Iterator[tuple[list[int], Difficulties]]:
    """Samples of each step, with its difficulties: those that DeepSpeed draws from the same seed.

    Samples that come in at the same step are a cluster. A step takes of each by its size, and of
    a cluster no sample twice before all of it was drawn.

    Args:
        length: of the data set.
        metrics: none: all samples are in from the start.
        paces: of metrics with a custom schedule.
        size: samples of a step.
        seed: of the order.

    Raises:
        ConfigError: an index does not fit the data set; later, that no sample is easy enough.
    """
    admitted = {metric.name: metric.admitted(length) for metric in metrics if metric.selects}
    return _draw(length, metrics, paces, admitted, size, np.random.default_rng(seed))


def _draw(
    length: int,
    metrics: Sequence[Metric],
    paces: Mapping[str, Pace],
    admitted: Mapping[str, Admitted],
    size: int,
    rng: np.random.Generator,
) -> Iterator[tuple[list[int], Difficulties]]:
    difficulties = {metric.name: metric.min_difficulty for metric in metrics}
    outside = np.ones(length, bool)
    clusters: list[_Cluster] = []
    for step in itertools.count(1):
        before = dict(difficulties)
        for metric in metrics:
            if before[metric.name] < metric.max_difficulty:
                difficulties[metric.name] = paces.get(metric.name, metric.pace)(step)
        if step == 1 or difficulties != before:
            inside = _inside(length, [each(difficulties[name]) for name, each in admitted.items()])
            new = inside[outside[inside]]
            outside[new] = False
            if len(new):
                rng.shuffle(new)
                clusters.append(_Cluster(new))
        if not clusters:
            raise ConfigError(
                f"no sample is easy enough for step {step}: {difficulties}",
                "raise min_difficulty of the metrics",
            )
        yield _batch(clusters, size, rng), dict(difficulties)


def _inside(length: int, admitted: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Samples that all metrics admit."""
    if not admitted:
        return np.arange(length)
    return functools.reduce(functools.partial(np.intersect1d, assume_unique=True), admitted)


def _batch(clusters: Sequence[_Cluster], size: int, rng: np.random.Generator) -> list[int]:
    sizes = [len(cluster.samples) for cluster in clusters]
    total = sum(sizes)
    chosen = rng.choice(len(clusters), size, p=[each / total for each in sizes])
    counts = np.bincount(chosen, minlength=len(clusters)).tolist()
    batch: list[int] = []
    for cluster, count in zip(clusters, counts, strict=True):
        batch += cluster.take(count, rng)
    rng.shuffle(batch)
    return batch
