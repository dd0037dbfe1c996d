"""How samples are spread over ranks and backwards."""

from __future__ import annotations

import dataclasses
import os

import torch.distributed as dist

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.settings import Settings


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of an optimizer step.

    Attributes:
        train: over all ranks.
        micro: per rank and backward.
        accumulation: backwards.
        sharing: ranks that work on the same samples, each on its part of the sequences.
        splitting: ranks that work on the same samples, each with its part of the model.
    """

    train: int
    micro: int
    accumulation: int
    sharing: int = 1
    splitting: int = 1

    def __str__(self) -> str:
        ranks = "ranks" if self.alike == 1 else f"times {self.alike} ranks that share samples"
        sizes = f"{self.micro} (micro-batch) × {self.accumulation} (accumulation)"
        return f"batch: {self.train} = {sizes} × {self.groups} ({ranks})"

    @property
    def groups(self) -> int:
        """Ranks, or groups of ranks, that work on samples of their own."""
        return self.train // (self.micro * self.accumulation)

    @property
    def alike(self) -> int:
        """Ranks that work on the same samples."""
        return self.sharing * self.splitting

    def place(self) -> int:
        """Which of the groups this rank belongs to, if ranks that share samples are neighbours."""
        joined = dist.is_available() and dist.is_initialized()
        rank = dist.get_rank() if joined else int(os.environ.get("RANK", "0"))
        return rank // self.alike


def batch_of(settings: Settings, ranks: int) -> Batch:
    """The sizes that a file names, and the one that follows from them.

    Raises:
        ConfigError: they do not multiply.
    """
    sharing = max(1, settings.get("sequence_parallel_size", 1))
    splitting = max(1, settings.get("tensor_parallel.autotp_size", 1))
    groups = settings.get("data_parallel_size", ranks // (sharing * splitting))
    if groups * sharing * splitting != ranks:
        raise ConfigError(
            f"{ranks} ranks are not {groups} × {sharing} × {splitting}, in which "
            f"sequence_parallel_size is {sharing} and autotp_size {splitting}",
            "change one of them, data_parallel_size, or the number of ranks",
        )
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (settings.get(name) for name in names)
    if micro is None and whole is not None:
        micro = whole // (groups * (steps or 1))
    if micro is None:
        raise ConfigError(
            "the file says neither train_batch_size nor train_micro_batch_size_per_gpu",
            'write one of them, or pass auto={"train_micro_batch_size_per_gpu": …} for "auto"',
        )
    if steps is None:
        steps = 1 if whole is None else whole // (groups * max(1, micro))
    if micro < 1 or steps < 1:
        raise ConfigError(
            f"train_micro_batch_size_per_gpu is {micro}, gradient_accumulation_steps is {steps}",
            "both are at least 1; train_batch_size is at least the number of ranks",
        )
    product = micro * steps * groups
    if whole not in (None, product):
        raise ConfigError(
            f"train_batch_size {whole} is not {micro} (micro-batch) × {steps} (accumulation) × "
            f"{groups} (ranks with samples of their own)",
            "change one of them; any two determine the third",
        )
    return Batch(product, micro, steps, sharing, splitting)
