"""Building a model without memory: what its constructors do is written down, and done later.

The ideas are those of deferred initialisation (torchdistx) and of `zero.Init` (DeepSpeed).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.sharding.streams import Draw, Source, Streams
from zerofx.torch_private import below_transforms, is_made_of_tensors, storage_key

_TAPE = "_zerofx_tape"
ALLOCATE = ("empty", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_ALLOCATE_LIKE = ("empty_like",)
_RANDOM = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_")
_INIT = ("_no_grad_trunc_normal_", "orthogonal_", "dirac_", "sparse_")
_OVERWRITE = (*_RANDOM, *_INIT, "geometric_", "zero_", "fill_", "copy_")


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor on the tape: a window on a storage, which a number names."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def whole(self) -> bool:
        """Whether it shows all of its storage."""
        return self.size.numel() * self.dtype.itemsize == self.num_bytes


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: references in place of tensors without memory.

    Attributes:
        op: an `OpOverload`, or a function of `nn.init`.
        args: positional arguments.
        kwargs: keyword arguments.
        results: what it returns, flattened; `None` for other things than tensors of the tape.
        draws: random numbers that it may draw.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Ref | None, ...]
    draws: tuple[Draw, ...] = ()

    @property
    def name(self) -> str:
        """Name of the operation without overload."""
        return getattr(self.op, "overloadpacket", self.op).__name__

    @property
    def storages(self) -> frozenset[int]:
        """Everything it reads or writes."""
        refs = [*refs_in(self.args), *refs_in(self.kwargs), *refs_in(self.results)]
        return frozenset(ref.storage for ref in refs)

    @property
    def sources(self) -> tuple[Source, ...]:
        """Generators that it is given."""
        return tuple(sources_in((self.args, self.kwargs)))

    def overwrites(self, storage: int) -> bool:
        """Whether what was in `storage` does not matter from here on."""
        if self.name not in _OVERWRITE or not self.args or not isinstance(self.args[0], Ref):
            return False
        target, sources = self.args[0], refs_in(self.args[1:])
        apart = all(ref.storage != storage for ref in sources)
        return target.storage == storage and target.whole and apart

    @property
    def gives_values(self) -> bool:
        """Whether it does more than allocate."""
        return self.name not in (*ALLOCATE, *_ALLOCATE_LIKE)


class Tape:
    """Operations in the order of construction.

    Attributes:
        steps: them.
        device: where they will run.
        streams: random numbers that they draw.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Step] = []
        self.device = device
        self.streams = Streams(device)
        self._alive: list[torch.UntypedStorage] = []
        self._known: set[int] = set()
        self._followed: dict[int, Tensor] = {}
        self._counts: list[tuple[int, Tensor, int]] = []

    def ref(self, value: Tensor) -> Ref:
        """What names `value`, whose storage knows the tape from here on."""
        key, storage = storage_key(value), value.untyped_storage()
        if key not in self._known:
            self._known.add(key)
            self._alive.append(storage)  # so that its number stays unique
            vars(storage)[_TAPE] = self
        return ref_to(value)

    def follow(self, value: Tensor) -> None:
        """Notice what is written to `value`, a tensor of the tape, once the recording has ended."""
        if not value.is_inference():  # those count no writes
            self._followed[id(value)] = value

    def end(self) -> None:
        """From here on writes are noticed, those that do not go through `.data`."""
        for each in self._followed.values():
            counter = each.detach()  # which shares the count of writes with its origin
            counter.data = each.new_empty(0)  # and keeps no storage alive, which has the tape
            self._counts.append((storage_key(each), counter, each._version))
        self._followed.clear()

    def written_since(self) -> set[int]:
        """Storages that were written to after the end."""
        return {key for key, counter, then in self._counts if counter._version > then}

    def written(self) -> set[int]:
        """Storages that are given values, and not only allocated, or copied from such."""
        done: set[int] = set()
        for step in filter(lambda step: step.gives_values, self.steps):
            read = {ref.storage for ref in refs_in((step.args, step.kwargs)) if ref.num_bytes}
            made = {ref.storage for ref in refs_in(step.results)} or read
            if made & read or read <= done:
                done |= made
        return done


def ref_to(value: Tensor) -> Ref:
    """What names `value` while its storage lives."""
    stride, offset = value.stride(), int(value.storage_offset())
    num_bytes = value.untyped_storage().nbytes()
    return Ref(storage_key(value), num_bytes, value.dtype, value.shape, stride, offset)


def tape_of(value: Tensor) -> Tape | None:
    """The recording of a tensor without memory."""
    return vars(value.untyped_storage()).get(_TAPE)


def is_recorded(value: Any, tape: Tape) -> bool:
    """Whether `value` is a plain tensor without memory whose storage is on `tape`."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return False
    if is_made_of_tensors(value) or below_transforms(value) is not value:
        return False  # which has no storage
    return value.is_meta and value.layout is torch.strided and tape_of(value) is tape


def flat(out: Any) -> list[Any]:
    """The things that an operation returns."""
    return list(out) if isinstance(out, (tuple, list)) else [out]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors among arguments, nested ones too."""
    return (item for item in leaves(value) if isinstance(item, Tensor))


def refs_in(value: Any) -> Iterator[Ref]:
    """References among arguments, nested ones too."""
    return (item for item in leaves(value) if isinstance(item, Ref))


def sources_in(value: Any) -> Iterator[Source]:
    """Generators of the tape among arguments, nested ones too."""
    return (item for item in leaves(value) if isinstance(item, Source))


def replaced(value: Any, change: Any) -> Any:
    """`value` with `change` applied to its leaves."""
    if isinstance(value, dict):
        return {key: replaced(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)([replaced(item, change) for item in value])
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """What is nested in tuples, lists and dictionaries."""
    items: Iterable[Any] | None = None
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = value
    if items is None:
        yield value
    else:
        for item in items:
            yield from leaves(item)
