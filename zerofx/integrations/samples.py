"""Samples under Accelerate where ranks share them, or where a file of DeepSpeed draws them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import accelerate
import torch
from accelerate.data_loader import prepare_data_loader
from accelerate.utils import broadcast_object_list, gather_object, recursively_apply
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler

from zerofx.errors import ConfigError
from zerofx.integrations.deepspeed.batch import Batch
from zerofx.integrations.deepspeed.data_keys import SAMPLING
from zerofx.integrations.deepspeed.sampling import DataSampler


class EpochSampler(Sampler[list[int]]):
    """Micro-batches of a `DataSampler` in epochs, for a trainer that counts them.

    Args:
        drawn: micro-batches of all epochs.
        epochs: how many those are.
        accumulation: micro-batches of a step.
        step: how many steps are done; the epoch that is iterated is the one which they end in.

    Attributes:
        drawn, epochs: see above.
        steps: of an epoch.
    """

    def __init__(
        self, drawn: DataSampler, epochs: int, accumulation: int, step: Callable[[], int]
    ) -> None:
        self.drawn, self.epochs = drawn, epochs
        self.steps = max(1, len(drawn) // accumulation // epochs)
        self._step, self._accumulation = step, accumulation

    def __len__(self) -> int:
        return self.steps * self._accumulation

    def __iter__(self) -> Iterator[list[int]]:
        first = self._step() // self.steps * len(self)
        if self.drawn.state_dict()["batches"] != first:
            self.drawn.load_state_dict({"batches": first})
        return itertools.islice(self.drawn, len(self))


_DRAWN = (DataSampler, EpochSampler)


def draw_from(data: Any, make_sampler: Callable[[Any], DataSampler]) -> DataSampler:
    """Call what makes a sampler for data, unless that is a stream: then raise a `ConfigError`."""
    if isinstance(data, IterableDataset):
        raise ConfigError(
            f"{SAMPLING} draws samples by number, and the training data is a stream of them",
            "use a data set with a length",
        )
    return make_sampler(data)


def refuse_more_epochs(sampler: EpochSampler, args: Any) -> None:
    """Raise a `ConfigError` if a trainer's arguments ask for more epochs than the file draws."""
    wanted = args.max_steps / sampler.steps if args.max_steps > 0 else args.num_train_epochs
    if wanted > sampler.epochs:
        raise ConfigError(
            f"{SAMPLING}.num_epochs is {sampler.epochs}, and the arguments ask for {wanted:g}",
            "raise it, or lower num_train_epochs or max_steps",
        )


def deals(loader: DataLoader[Any], batch: Batch) -> bool:
    """Whether Accelerate would deal out samples of a data loader otherwise than a file says."""
    return batch.alike > 1 or isinstance(loader.batch_sampler, _DRAWN)


def with_sampler(loader: DataLoader[Any], sampler: Sampler[list[int]]) -> DataLoader[Any]:
    """A data loader like another one, whose samples are drawn otherwise."""
    kept = (
        *("dataset", "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn"),
        *("multiprocessing_context", "prefetch_factor", "persistent_workers"),
    )
    options: dict[str, Any] = {name: getattr(loader, name) for name in kept}
    return DataLoader(batch_sampler=sampler, **options)


def shared_loader(
    accelerator: accelerate.Accelerator, loader: DataLoader[Any], batch: Batch, placed: bool | None
) -> DataLoader[Any]:
    """What Accelerate makes of a data loader, where ranks that work together take the same samples.

    Args:
        accelerator: whose options hold.
        loader: of all samples, or with a sampler that draws for this rank.
        batch: says which ranks work together.
        placed: whether samples go to the device; by default as the accelerator says.

    Raises:
        ConfigError: one process is to read for all.
    """
    if accelerator.dispatch_batches:
        raise ConfigError(
            "dispatch_batches has one process read for all, and ranks share samples here",
            "leave it out: each rank reads what it takes",
        )
    _draw_alike(loader, batch.place())
    drawn = isinstance(loader.batch_sampler, _DRAWN)
    return prepare_data_loader(
        loader,
        accelerator.device,
        num_processes=1 if drawn else batch.groups,
        process_index=0 if drawn else batch.place(),
        split_batches=accelerator.split_batches,
        put_on_device=accelerator.device_placement if placed is None else placed,
        rng_types=list(accelerator.rng_types or ()),
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
        non_blocking=accelerator.non_blocking,
        use_stateful_dataloader=accelerator.use_stateful_dataloader,
    )


def _draw_alike(loader: Any, place: int) -> None:
    """Give ranks that share samples one order of them, and their workers one seed."""
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.generator is None:
        seed = broadcast_object_list([int(torch.empty((), dtype=torch.int64).random_())])
        loader.sampler.generator = torch.Generator().manual_seed(seed[0])
    start = loader.worker_init_fn
    if isinstance(start, functools.partial) and "rank" in start.keywords:  # transformers'
        loader.worker_init_fn = functools.partial(start, rank=place)


def gather_once(
    accelerator: accelerate.Accelerator, values: Any, batch: Batch, *, as_objects: bool
) -> Any:
    """`gather_for_metrics` where ranks share samples: what the first of them has, once.

    Args:
        accelerator: gathers.
        values: tensors, nested, whose rows are samples; or objects.
        batch: says which ranks share samples.
        as_objects: pickle tensors, too.
    """
    state = accelerator.gradient_state
    most = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
    if as_objects or not _all_tensors(values):
        first = accelerator.process_index % batch.alike == 0
        return gather_object(values if first else [])[:most]
    found = accelerator.gather(values)
    return recursively_apply(
        lambda each: _by_rank(each, batch)[:, 0, 0].flatten(0, 1)[:most], found
    )


def sum_over_sequence(accelerator: accelerate.Accelerator, share: Tensor, batch: Batch) -> Tensor:
    """The sum of what the ranks of a sequence have of a number."""
    found: Any = accelerator.gather(share.reshape(1))
    return _by_rank(found, batch)[batch.place(), :, 0].sum()


def _by_rank(gathered: Tensor, batch: Batch) -> Tensor:
    """Rows by group of ranks, rank of a sequence, rank of a model."""
    return gathered.unflatten(0, (batch.groups, batch.sharing, batch.splitting, -1))


def _all_tensors(values: Any) -> bool:
    try:
        recursively_apply(lambda each: each, values, error_on_other_type=True)
    except TypeError:
        return False
    return True
