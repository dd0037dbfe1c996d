"""Doing what a tape says, while each rank keeps only its rows of what is done.

Every rank draws the same random numbers, so that values equal those of one process. A parameter
exists whole from the first operation that matters to it until the last.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerofx.runtime.comm import Comm
from zerofx.sharding.agreement import told
from zerofx.sharding.streams import Generators, Source, states_of
from zerofx.sharding.tape import Ref, Step, Tape, flat, replaced, tensors_in
from zerofx.torch_private import all_gather_flat

_SOON = 16
"""A value that is used again within so many operations stays whole meanwhile."""

_SMALL = 4096
"""Bytes of a storage that is not worth dividing."""

Finish = Callable[[int, torch.UntypedStorage], None]


def replay(tape: Tape, comm: Comm, finish: Finish) -> None:
    """Run a tape; every rank must.

    Args:
        tape: the same on every rank.
        comm: the ranks; random states are those of the first one, and generators stay as they are.
        finish: called with each storage after its last use; after that it is dropped.
    """
    draws = [draw for step in tape.steps for draw in step.draws]
    states = told(comm, 0, states_of(draws))
    devices = [tape.device] if tape.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        generators = Generators(tape.streams, tape.device, draws, states)
        _Replay(tape, comm, finish, generators).run()


class _Replay:
    def __init__(self, tape: Tape, comm: Comm, finish: Finish, generators: Generators) -> None:
        self._tape = tape
        self._comm = comm
        self._finish = finish
        self._generators = generators
        self._whole: dict[int, torch.UntypedStorage] = {}
        self._divided: dict[int, tuple[Tensor, int]] = {}
        self._uses: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        for number, step in enumerate(tape.steps):
            for storage in step.storages:
                self._uses[storage].append(number)

    def run(self) -> None:
        for number, step in enumerate(self._tape.steps):
            self._run(step)
            for storage in step.storages:
                self._uses[storage].popleft()
                self._put_away(storage, number)

    def _run(self, step: Step) -> None:
        drawn = [self._generators[source].device for source in step.sources]
        away = next((device for device in drawn if device.type != self._tape.device.type), None)

        def real(value: Any) -> Any:
            if isinstance(value, Ref):
                return self._tensor(value, step)
            if isinstance(value, Source):
                return self._generators[value]
            if isinstance(value, torch.device):
                return away or self._tape.device
            return value.to(self._tape.device) if isinstance(value, Tensor) else value

        given = replaced((step.args, step.kwargs), real)
        with self._generators.drawing(step.draws):
            out = _called_on(away, step.op, *given) if away else step.op(*given[0], **given[1])
        for ref, value in zip(step.results, flat(out), strict=True):
            if ref is not None and ref.storage not in self._whole:
                value = value.to(self._tape.device)
                self._whole[ref.storage] = _laid_out(value, ref).untyped_storage()

    def _tensor(self, ref: Ref, step: Step) -> Tensor:
        storage = self._whole.get(ref.storage)
        if storage is None:
            if ref.storage in self._divided and not step.overwrites(ref.storage):
                storage = self._gather(ref.storage)
            else:
                self._divided.pop(ref.storage, None)
                storage = _allocate(ref.num_bytes, self._tape.device)
            self._whole[ref.storage] = storage
        return window(storage, ref)

    def _put_away(self, storage: int, now: int) -> None:
        uses, value = self._uses[storage], self._whole[storage]
        if not uses:
            self._finish(storage, self._whole.pop(storage))
        elif self._tape.steps[uses[0]].overwrites(storage):
            del self._whole[storage]
        elif uses[0] - now > _SOON and value.nbytes() > _SMALL:
            self._divide(storage)

    def _divide(self, storage: int) -> None:
        value = self._whole.pop(storage)
        size = -(-value.nbytes() // self._comm.size)
        mine = _bytes(value)[self._comm.rank * size : (self._comm.rank + 1) * size]
        chunk = mine.new_zeros(size)
        chunk[: mine.numel()] = mine
        self._divided[storage] = chunk, value.nbytes()

    def _gather(self, storage: int) -> torch.UntypedStorage:
        chunk, num_bytes = self._divided.pop(storage)
        out = chunk.new_empty(chunk.numel() * self._comm.size)
        all_gather_flat(out, chunk, self._comm.group).wait()
        whole = _allocate(num_bytes, self._tape.device)
        _bytes(whole).copy_(out[:num_bytes])
        return whole


def _called_on(device: torch.device, op: Any, args: Any, kwargs: Any) -> Any:
    """Call `op` where its generator is, and bring back what it wrote."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    there = replaced((args, kwargs), moved)
    out = op(*there[0], **there[1])
    for mine, its in zip(tensors_in((args, kwargs)), tensors_in(there), strict=True):
        mine.copy_(its)
    return out


def window(storage: torch.UntypedStorage, ref: Ref) -> Tensor:
    """The tensor that `ref` shows on `storage`."""
    value = torch.empty(0, dtype=ref.dtype, device=storage.device)
    return value.set_(storage, ref.offset, ref.size, ref.stride)


def _laid_out(value: Tensor, ref: Ref) -> Tensor:
    """`value` with the strides that it had on the tape."""
    same = value.stride() == ref.stride and value.storage_offset() == ref.offset
    if same and value.untyped_storage().nbytes() == ref.num_bytes:
        return value
    out = window(_allocate(ref.num_bytes, value.device), ref)
    return out.copy_(value)


def _allocate(num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
