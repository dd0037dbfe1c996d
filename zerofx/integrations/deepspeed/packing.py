"""`dynamic_batching`: as many samples at once as have so many tokens, and rates that follow."""

from __future__ import annotations

import dataclasses
import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.data_keys import BATCHING
from zerofx.integrations.deepspeed.indexed import read_indexed
from zerofx.integrations.deepspeed.settings import Settings

_log = logging.getLogger(__name__)
_ORDERS = ("dataloader", "random", "seqlen")
_SCALINGS = ("linear", "sqrt", "none")


@dataclasses.dataclass(frozen=True)
class Packing:
    """What the section asks for, with DeepSpeed's names."""

    max_tokens: int
    metrics_path: str = ""
    lr_scaling_method: str = "linear"
    min_batch_size: int = 1
    max_batch_size: int | None = None
    sequence_picking_order: str = "dataloader"

    def lengths(self) -> list[int]:
        """Tokens of each sample, as the data analyzer wrote them.

        Raises:
            ConfigError: it did not.
        """
        prefix = str(Path(self.metrics_path, "seqlen", "seqlen_sample_to_metric"))
        return read_indexed(prefix, f"{BATCHING}.metrics_path").values.tolist()

    def packs(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Samples that go together, in order. As in DeepSpeed, the last one goes nowhere.

        Raises:
            ConfigError: `min_batch_size` samples have too many tokens.
        """
        order = list(range(len(lengths)))
        if self.sequence_picking_order == "random":
            random.Random(seed).shuffle(order)
        elif self.sequence_picking_order == "seqlen":
            order.sort(key=lambda sample: lengths[sample])
        fitting = [sample for sample in order if lengths[sample] <= self.max_tokens]
        if len(fitting) < len(order):
            _log.warning(
                "%d samples have more than max_tokens (%d) and are left out",
                len(order) - len(fitting),
                self.max_tokens,
            )
        packs: list[list[int]] = [[]]
        tokens = 0
        for sample in fitting[:-1]:
            if tokens + lengths[sample] > self.max_tokens or len(packs[-1]) == self.max_batch_size:
                packs.append([])
                tokens = 0
            packs[-1].append(sample)
            tokens += lengths[sample]
        if any(len(pack) < self.min_batch_size for pack in packs[:-1]):
            raise ConfigError(
                f"{BATCHING}: {self.min_batch_size} samples (min_batch_size) have more tokens than "
                f"max_tokens, {self.max_tokens}",
                "raise max_tokens, or lower min_batch_size",
            )
        return packs if len(packs[-1]) >= self.min_batch_size else packs[:-1]

    def factor(self, samples: int, usual: int) -> float:
        """What a step of so many samples multiplies the learning rate by."""
        if self.lr_scaling_method == "none":
            return 1.0
        ratio = samples / usual
        return math.sqrt(ratio) if self.lr_scaling_method == "sqrt" else ratio


def packing_of(settings: Settings) -> Packing | None:
    """The section; `None` if it is not enabled.

    Raises:
        ConfigError: `max_tokens` is missing, or a value makes no sense.
    """
    given = settings.section(BATCHING)
    if not given.pop("enabled", False):
        return None
    given.pop("verbose", None)
    if "max_tokens" not in given:
        raise ConfigError(f"{BATCHING} is enabled without max_tokens", "write it")
    packing = Packing(**given)
    _refuse_other("sequence_picking_order", packing.sequence_picking_order, _ORDERS)
    _refuse_other("lr_scaling_method", packing.lr_scaling_method, _SCALINGS)
    least, most = packing.min_batch_size, packing.max_batch_size
    if least < 1 or (most is not None and most < least):
        raise ConfigError(
            f"{BATCHING}: min_batch_size is {least}, max_batch_size {most}",
            "use at least 1 sample, and no maximum below the minimum",
        )
    return packing


def _refuse_other(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{BATCHING}.{name} is {value!r}", f"use one of {', '.join(choices)}")
