"""Optimizer state of parameters that have owners: whole there, or in rows for all to see."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from zerofx.runtime.owner_options import everyones, tell
from zerofx.runtime.owners import Owned, exchange, from_owners, rows_of, to_owners
from zerofx.runtime.parameter import local_tensor
from zerofx.runtime.params import ParamState, as_dtensor
from zerofx.runtime.session import Session

State = collections.defaultdict[Tensor, Any]
"""An optimizer's: names and values, by parameter."""

Owners = Sequence[tuple[ParamState, int]]
"""Parameters, each with the position of its owner on the shard axis."""


@dataclasses.dataclass(frozen=True)
class _Like:
    """What other ranks learn of a tensor."""

    shape: torch.Size
    dtype: torch.dtype


def settle(state: State, session: Session, owners: Owners) -> None:
    """Give what was loaded, or cut when the model was sharded, to the owners alone; in place."""
    found = [
        (param.param, key, _lying(value, owner))
        for param, owner in owners
        for key, value in state.get(param.param, {}).items()
        if isinstance(value, DTensor)
    ]
    if found:
        tensors = [tensor for _, _, tensor in found]
        wholes = exchange(session, to_owners, "tensors of optimizer state", tensors)
        for (param, key, _), whole in zip(found, wholes, strict=True):
            state[param][key] = whole
    for param, owner in owners:
        if owner != session.axes.shard.rank and param.param in state:
            state[param.param] = {}


def spread(state: State, session: Session, owners: Owners) -> State:
    """What all ranks may show of a state that is settled: tensors as `DTensor`s, in rows."""
    comm, domain = session.axes.shard, session.sharded
    mine = {
        place: {key: _described(value) for key, value in state[param.param].items()}
        for place, (param, owner) in enumerate(owners)
        if owner == comm.rank and param.param in state
    }
    told = tell(mine, comm)
    # In the same order on all ranks: who reads it may gather tensor by tensor.
    named = [param.param for param, _ in owners if param.param in state]
    shown: State = collections.defaultdict(dict, {param: {} for param in named} | everyones(state))
    places: list[tuple[Tensor, str]] = []
    tensors: list[Owned] = []
    wholes: list[Tensor] = []
    for place, entries in sorted(item for each in told for item in each.items()):
        param, owner = owners[place]
        for key, value in entries.items():
            shown[param.param][key] = value
            if isinstance(value, _Like):
                rows = _empty_rows(value, session)
                places.append((param.param, key))
                tensors.append(Owned(rows, value.shape, domain.layout.sharded, owner))
                wholes.append(state[param.param].get(key, rows))
    exchange(session, from_owners, "tensors of optimizer state", wholes, tensors)
    for (param, key), tensor in zip(places, tensors, strict=True):
        shown[param][key] = as_dtensor(tensor.local, tensor.shape, domain)
    return shown


def _lying(value: DTensor, owner: int) -> Owned:
    split = isinstance(value.placements[-1], Shard)
    return Owned(local_tensor(value).contiguous(), value.shape, split, owner)


def _described(value: Any) -> Any:
    """Tensors by their kind; anything else, counts of steps for example, as it is."""
    many = isinstance(value, Tensor) and value.ndim > 0
    return _Like(value.shape, value.dtype) if many else value


def _empty_rows(like: _Like, session: Session) -> Tensor:
    """Memory for this rank's rows of such a tensor."""
    rows, shard = torch.empty(like.shape, dtype=like.dtype, device="meta"), session.axes.shard
    if session.sharded.layout.sharded:
        rows = rows_of(rows, shard.size)[shard.rank]
    return torch.empty_like(rows, device=session.device)
