"""Ranks agree on a tape: numbers that constructors computed are the first rank's.

They differ where they come from Python's or numpy's generators, say, which each rank seeds for
itself. Operations and shapes must not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.comm import Comm
from zerofx.sharding.streams import Draw
from zerofx.sharding.tape import Ref, Step, Tape, leaves, replaced


def agree(tape: Tape, wanted: Mapping[str, Ref], changed: Mapping[str, str], comm: Comm) -> None:
    """Give the tape of every rank the constants of the first one; every rank must call it.

    Args:
        tape: of this rank.
        wanted: what is to be made, by name.
        changed: what was done to some of it since, by name.
        comm: the ranks.

    Raises:
        UnsupportedError: on every rank, if operations differ; says which one is the first.
    """
    if comm.size == 1:
        return
    lines = list(_lines(tape, wanted, changed))
    constants = [leaf for step in tape.steps for leaf in _constants(step)]
    mine = _digest(line.encode() for line in lines), _digest(map(_bytes, constants))
    said: list[Any] = [None] * comm.size
    dist.all_gather_object(said, mine, group=comm.group)
    for odd, (operations, _) in enumerate(said):
        if operations != said[0][0]:
            _refuse(lines, odd, comm)
    if any(each != said[0] for each in said):
        first = iter(told(comm, 0, [_on_cpu(value) for value in constants]))
        tape.steps = [_with_constants(step, first) for step in tape.steps]


def _lines(tape: Tape, wanted: Mapping[str, Ref], changed: Mapping[str, str]) -> Iterator[str]:
    """A tape without its constants; storages have numbers in the order in which they are met."""
    numbers: dict[int, int] = {}

    def text(value: Any) -> str:
        if isinstance(value, Ref):
            number = numbers.setdefault(value.storage, len(numbers))
            window = f"{[*value.size]} by {[*value.stride]} from {value.offset}"
            return f"%{number}: {value.dtype}{window} of {value.num_bytes} bytes"
        if isinstance(value, Tensor):
            return f"{value.dtype}{[*value.shape]}"
        if isinstance(value, torch.device):
            return "device"  # each rank has its own
        if isinstance(value, dict):
            return str({key: text(item) for key, item in value.items()})
        if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
            return f"[{', '.join(map(text, value))}]"
        return "number" if _is_constant(value) else str(value)

    for step in tape.steps:
        draws = [(draw.source.number, _origin(draw)) for draw in step.draws]
        yield f"{step.name}({text(step.args)}, {text(step.kwargs)}) -> {text(step.results)} {draws}"
    for name, ref in wanted.items():
        yield f"{name} is {text(ref)} {changed.get(name, 'as recorded')}"


def _origin(draw: Draw) -> str:
    return "a state" if isinstance(draw.begins, Tensor) else f"draw {draw.begins}"


def _constants(step: Step) -> Iterator[Any]:
    return filter(_is_constant, leaves((step.args, step.kwargs)))


def _is_constant(value: Any) -> bool:
    """Whether it may differ between ranks: shapes show in what an operation returns."""
    return isinstance(value, (Tensor, int, float, complex))


def _with_constants(step: Step, values: Iterator[Any]) -> Step:
    def take(value: Any) -> Any:
        return next(values) if _is_constant(value) else value

    return dataclasses.replace(
        step, args=replaced(step.args, take), kwargs=replaced(step.kwargs, take)
    )


def _refuse(lines: Sequence[str], odd: int, comm: Comm) -> None:
    pairs = enumerate(itertools.zip_longest(*(told(comm, each, lines) for each in (0, odd))))
    number, pair = next((number, pair) for number, pair in pairs if pair[0] != pair[1])
    ranks = [f"rank {comm.ranks[each]}" for each in (0, odd)]
    raise UnsupportedError(
        f"{ranks[0]} and {ranks[1]} build different models: they differ first in step {number} of "
        "what meta_init recorded",
        "build the model in the same way on every rank; numbers may differ (rank 0's are used), "
        "but not which operations make a value, or where they set seeds",
        [f"{rank}: {line or 'nothing more'}" for rank, line in zip(ranks, pair, strict=True)],
    )


def told(comm: Comm, position: int, value: Any) -> Any:
    """What the rank at that position of `comm` has for a value; every rank must call it."""
    found = [value]
    if comm.size > 1:
        dist.broadcast_object_list(found, comm.ranks[position], group=comm.group)
    return found[0]


def _digest(parts: Iterable[bytes]) -> bytes:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.digest()


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _bytes(value: Any) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    whole = value.cpu().clone(memory_format=torch.contiguous_format)
    return torch.empty(0, dtype=torch.uint8).set_(whole.untyped_storage()).numpy().tobytes()
