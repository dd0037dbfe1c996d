"""Rows that each rank has its own of, and what is alike on all: the first rank's is saved."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.checkpoint.ranks import Ranks
from zerofx.errors import UnsupportedError
from zerofx.runtime.parameter import local_tensor

State = dict[str, Any]


def split(state: Mapping[Any, Any]) -> tuple[State, State]:
    """Rows of sharded tensors, and what is none; a list with rows becomes a dict by numbers."""
    rows: State = {}
    rest: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            rows[key], rest[key] = split(value)
        elif isinstance(value, list) and _has_rows(value):  # DCP has the same names for both
            rows[key], rest[key] = split(dict(enumerate(value)))
        else:
            (rows if isinstance(value, DTensor) else rest)[key] = value
    return rows, rest


def join(rows: State, rest: State) -> State:
    """What `split` split."""
    both = {**rows, **rest}
    for key, value in rows.items():
        if isinstance(value, dict):
            both[key] = join(value, rest.get(key, {}))
    return both


def refuse_lost(
    model: Mapping[str, Any], parts: Sequence[tuple[Optimizer, State]], ranks: Ranks
) -> None:
    """Refuse optimizers of whose state a checkpoint would have the first rank's rows alone.

    Args:
        model: values by name.
        parts: optimizers with their state.
        ranks: that save together; all of them come here.

    Raises:
        UnsupportedError: on all ranks; names optimizer, parameter and key.
    """
    entries = [
        (name, each, type(optimizer).__name__)
        for optimizer, state in parts
        for name, each in state["state"].items()
    ]
    sealed = [f"{name}: {key} of {of}" for name, each, of in entries for key in _sealed(each)]
    if sealed:
        raise UnsupportedError(
            "tuples in the state of optimizers have tensors of which each rank has its rows, and "
            "torch.distributed.checkpoint saves a tuple as one thing, the first rank's",
            "keep them in a list or a dict",
            sealed,
        )
    mine = {
        f"{name}: {key} of {of}": _digest(value) if _may_be_rows(value, model[name]) else ""
        for name, each, of in entries
        if _is_cut(model.get(name))
        for key, value in _tensors(each)
        if value.ndim and not isinstance(value, DTensor)
    }
    everyones = ranks.everyones(lambda: mine)
    lost: list[str] = []
    for label in dict.fromkeys(label for each in everyones for label in each):
        digests = {each[label] for each in everyones if label in each}
        # What is alike on all ranks, or on one of them no rows, has as many by chance.
        if len(digests) > 1 and "" not in digests:
            lost.append(label)
    if lost:
        raise UnsupportedError(
            "plain tensors in the state of optimizers have the rows of this rank's shards, other "
            "ones on each rank, and a checkpoint would have the first rank's alone",
            "keep state as DTensors, as torch.zeros_like(param) makes it, and compute by "
            "state.to_local(); or save the model alone",
            lost,
        )


def rows_in(value: Any, name: str) -> list[str]:
    """What is in something that one rank pickles for all, and is that rank's part of a tensor.

    Args:
        value: anything; tensors in containers and in attributes of objects are found.
        name: its own.

    Returns:
        Names of tensors, or shapes where no container says a name.
    """
    finder = _Finder()
    with contextlib.suppress(Exception):  # what pickle does not take is refused where it is saved
        finder.dump(value)
    if not finder.shapes:
        return []
    return [at for at, each in _tensors(value, name) if _is_cut(each)] or finder.shapes


class _Finder(pickle.Pickler):
    """Goes through what pickle would write, looks at tensors and writes none of their values."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), 5, buffer_callback=lambda _: None)
        self.shapes: list[str] = []

    def persistent_id(self, obj: Any) -> str | None:
        if _is_cut(obj):
            self.shapes.append(f"shape {list(obj.shape)}")
        return "tensor" if isinstance(obj, Tensor) else None


def _has_rows(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return any(map(_has_rows, value.values() if isinstance(value, dict) else value))
    return isinstance(value, DTensor)


def _sealed(value: Any, name: str = "", *, inside: bool = False) -> Iterator[str]:
    """Where rows are in something that DCP does not open."""
    if isinstance(value, DTensor) and inside:
        yield name
    for key, item in _items(value):
        closed = inside or not isinstance(value, (Mapping, list))
        yield from _sealed(item, f"{name}.{key}" if name else str(key), inside=closed)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors in containers, and their names."""
    if isinstance(value, Tensor):
        yield name, value
    for key, item in _items(value):
        yield from _tensors(item, f"{name}.{key}" if name else str(key))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from enumerate(value)


def _is_cut(param: Any) -> bool:
    if not isinstance(param, DTensor):
        return False
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    return any(size > 1 and not each.is_replicate() for each, size in sizes)


def _may_be_rows(value: Tensor, param: DTensor) -> bool:
    local = local_tensor(param)
    return value.shape[0] == local.shape[0] or value.numel() == local.numel()


def _digest(value: Tensor) -> str:
    file = io.BytesIO()
    torch.save(value.detach().to("cpu", copy=True), file)
    return hashlib.sha256(file.getvalue()).hexdigest()
