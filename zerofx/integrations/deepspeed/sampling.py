"""`data_sampling`: which samples each rank takes for each micro-batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized

import numpy as np
from torch.utils.data import Sampler

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.batch import Batch
from zerofx.integrations.deepspeed.curriculum import Metric, Pace, metrics_of
from zerofx.integrations.deepspeed.data_keys import BATCHING, CURRICULUM, METRICS, SAMPLING
from zerofx.integrations.deepspeed.draws import Difficulties, draw
from zerofx.integrations.deepspeed.packing import Packing, packing_of
from zerofx.integrations.deepspeed.settings import Settings

Parts = list[list[list[int]]]
"""Samples of a step, by micro-batch and group of ranks."""

Step = tuple[Parts, Difficulties]


@dataclasses.dataclass(frozen=True)
class Sampling:
    """What the section asks for.

    Attributes:
        seed: of the order.
        num_epochs: how often all samples are drawn.
        drop_last: whether a last step is left out for which samples must be drawn once more.
        metrics: of curriculum learning, if that is enabled.
        packing: of dynamic batching, if that is enabled.
    """

    seed: int
    num_epochs: int
    drop_last: bool
    metrics: tuple[Metric, ...]
    packing: Packing | None

    @property
    def scales_rates(self) -> bool:
        """Whether learning rates follow the samples of a step."""
        return self.packing is not None and self.packing.lr_scaling_method != "none"


def sampling_of(settings: Settings) -> Sampling | None:
    """The section; `None` if it is not enabled.

    Raises:
        ConfigError: values make no sense, alone or together.
    """
    if not settings.get(f"{SAMPLING}.enabled", False):
        return None
    metrics, packing = metrics_of(settings), packing_of(settings)
    if metrics and packing is not None:
        raise ConfigError(
            f"{CURRICULUM} and {BATCHING} both say which samples a step takes", "enable one of them"
        )
    epochs = settings.get(f"{SAMPLING}.num_epochs", 1000)
    if epochs < 1:
        raise ConfigError(f"{SAMPLING}.num_epochs is {epochs}", "use at least 1")
    seed = settings.get("data_efficiency.seed", 1234)
    drop_last = settings.get("dataloader_drop_last", False)
    return Sampling(seed, epochs, drop_last, metrics, packing)


class DataSampler(Sampler[list[int]]):
    """The `batch_sampler` of a `DataLoader`: this rank's micro-batches, of all epochs.

    It talks to nobody: ranks draw alike, and each takes its part. Iterating goes on where it
    stopped.

    Attributes:
        difficulties: by metric, in the step that the last micro-batch is of.
        rate_factors: what steps multiply learning rates by, in turn.

    Args:
        steps: samples of one step after the other, from the first on.
        num_steps: how many there are.
        accumulation: micro-batches of a step.
        place: which of the groups of ranks this one belongs to.
        rate_factors: see above.
    """

    def __init__(
        self,
        steps: Callable[[], Iterator[Step]],
        num_steps: int,
        accumulation: int,
        place: int,
        rate_factors: Sequence[float] = (1.0,),
    ) -> None:
        self._begin, self._num_steps = steps, num_steps
        self._accumulation, self._place = accumulation, place
        self.rate_factors = rate_factors
        self.load_state_dict({"batches": 0})

    def __len__(self) -> int:
        return self._num_steps * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        while self._taken < len(self):
            step, part = divmod(self._taken, self._accumulation)
            while self._drawn <= step:
                self._parts, self.difficulties = next(self._steps)
                self._drawn += 1
            self._taken += 1
            yield self._parts[part][self._place]

    def state_dict(self) -> dict[str, int]:
        """How many micro-batches were handed out; workers of a `DataLoader` ask ahead of you."""
        return {"batches": self._taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after so many micro-batches; steps before that are drawn again, and dropped."""
        self._taken, self._drawn = state["batches"], 0
        self._steps = self._begin()
        self.difficulties: Difficulties = {}


def rate_factors(sampling: Sampling | None, sampler: DataSampler | None) -> Sequence[float] | None:
    """What steps multiply learning rates by; `None` if a file does not scale them.

    Raises:
        ConfigError: it does, and the sampler is missing.
    """
    if sampling is None or not sampling.scales_rates:
        return None
    if sampler is None:
        raise ConfigError(
            f"{BATCHING}.lr_scaling_method: learning rates follow the samples of a step",
            "pass the sampler to make_scheduler",
        )
    return sampler.rate_factors


def make_sampler(
    sampling: Sampling | None,
    batch: Batch,
    data: Sized | int,
    place: int | None,
    paces: Mapping[str, Pace],
    lengths: Sequence[int] | None,
) -> DataSampler:
    """Build the sampler of one rank; see `Recipe.make_sampler`."""
    if sampling is None:
        raise ConfigError(f"the file does not enable {SAMPLING}", "enable it, or draw yourself")
    length = data if isinstance(data, int) else len(data)
    place = batch.place() if place is None else place
    if not 0 <= place < batch.groups:
        raise ConfigError(
            f"place is {place}, but there are {batch.groups} groups of ranks",
            "pass place=…, or the number of ranks as world_size of from_deepspeed",
        )
    _check_paces(sampling.metrics, paces)
    if sampling.packing is not None:
        steps, factors = _packed(sampling.packing, sampling.seed, batch, length, lengths)
        again = functools.partial(itertools.cycle, [(step, {}) for step in steps])
        total = len(steps) * sampling.num_epochs
        return DataSampler(again, total, batch.accumulation, place, factors)
    if lengths is not None:
        raise ConfigError(f"lengths are given, but {BATCHING} is not enabled", "enable it")
    samples = length * sampling.num_epochs
    whole, rest = divmod(samples, batch.train)
    total = whole + bool(rest and not sampling.drop_last)
    if total == 0:
        raise ConfigError(
            f"{samples} samples in all epochs are not enough for train_batch_size, {batch.train}",
            "lower it, or say dataloader_drop_last: false",
        )
    drawn = functools.partial(_drawn, sampling, batch, length, paces)
    return DataSampler(drawn, total, batch.accumulation, place)


def _drawn(
    sampling: Sampling, batch: Batch, length: int, paces: Mapping[str, Pace]
) -> Iterator[Step]:
    shape = (batch.accumulation, batch.groups, batch.micro)
    steps = draw(length, sampling.metrics, paces, batch.train, sampling.seed)
    return ((np.reshape(samples, shape).tolist(), found) for samples, found in steps)


def _packed(
    packing: Packing, seed: int, batch: Batch, length: int, given: Sequence[int] | None
) -> tuple[list[Parts], list[float]]:
    """Steps of one epoch, each of `batch.train` packs, and what they multiply rates by."""
    lengths = packing.lengths() if given is None else given
    if len(lengths) != length:
        raise ConfigError(
            f"{BATCHING}: {len(lengths)} lengths for {length} samples",
            "pass lengths=…, or analyze this data set",
        )
    packs = packing.packs(lengths, seed)
    if len(packs) < batch.train:
        raise ConfigError(
            f"{BATCHING}: a step takes {batch.train} packs (train_batch_size) of max_tokens, "
            f"{packing.max_tokens}; the samples make {len(packs)}",
            "lower one of them",
        )
    steps: list[Parts] = []
    factors: list[float] = []
    for first in range(0, len(packs) - batch.train + 1, batch.train):
        step = packs[first : first + batch.train]
        factors.append(packing.factor(sum(map(len, step)), batch.train))
        steps.append(_spread(step, batch))
    return steps, factors


def _spread(packs: Sequence[list[int]], batch: Batch) -> Parts:
    """Packs of a step, dealt to groups in turn; `batch.micro` of them are a micro-batch."""
    dealt = [packs[group :: batch.groups] for group in range(batch.groups)]
    starts = range(0, batch.micro * batch.accumulation, batch.micro)
    return [
        [list(itertools.chain(*own[start : start + batch.micro])) for own in dealt]
        for start in starts
    ]


def _check_paces(metrics: Sequence[Metric], paces: Mapping[str, Pace]) -> None:
    custom = {metric.name for metric in metrics if metric.schedule_type == "custom"}
    if custom != set(paces):
        raise ConfigError(
            "paces are not those of the metrics with a custom schedule",
            "pass a function from steps to difficulties for each of them",
            [f"{METRICS}.{name}" for name in sorted(custom ^ set(paces))],
        )
