"""What an optimizer writes down while it steps that no parameter owns: counts of steps, mostly.

Owners step apart, so each writes to groups and to a state of its own. Where all write the same, it
is everybody's; where they do not, the optimizer has looked at several parameters at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from zerofx.errors import ShardingError
from zerofx.runtime.comm import Comm

_REMEDY = (
    "OwnerOptimizer is for optimizers that treat each parameter by itself and keep what they "
    "remember in the state of parameters or in param_groups; train without sharding optimizer "
    "states, or choose another one"
)


@dataclasses.dataclass(frozen=True)
class Written:
    """What one rank's step wrote.

    Attributes:
        entries: new or changed options by group, and last entries of the state under keys that are
            no parameters; `None` where it owns nothing.
        lost: what changed and cannot be carried to the next step: numbers and tensors of the
            optimizer itself, state of tensors that are no parameters.
        joint: it updates a parameter by what others are.
        tells: this is the first step of its kind, by which later ones go.
    """

    entries: list[dict[Any, Any] | None]
    lost: list[str]
    joint: bool = False
    tells: bool = False

    @property
    def anything(self) -> bool:
        """Whether it wrote anything at all."""
        return any(self.entries) or bool(self.lost)


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that count or measure."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float | Tensor) and not isinstance(value, bool)
    }


def seen(entries: Mapping[Any, Any]) -> dict[Any, tuple[Any, int]]:
    """Values as they are, each with the number of writes to it; state of parameters aside."""
    return {
        key: (value, value._version if isinstance(value, Tensor) else 0)
        for key, value in everyones(entries).items()
        if key != "params"
    }


def everyones(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of an optimizer's state under keys that are no parameters."""
    return {key: entry for key, entry in state.items() if not isinstance(key, Tensor)}


def changes(before: Mapping[Any, tuple[Any, int]], after: Mapping[Any, Any]) -> dict[Any, Any]:
    """What is new, has another value, or is a tensor that was written to."""
    return {
        key: value
        for key, (value, writes) in seen(after).items()
        if not (key in before and writes == before[key][1] and same(before[key][0], value))
    }


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; tensors bit for bit."""
    if one is other:
        return True  # a learning rate on a GPU: no wait for its number
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def tell(mine: Any, comm: Comm) -> list[Any]:
    """What every rank along an axis passes; all of them must call this."""
    told: list[Any] = [None] * comm.size
    dist.all_gather_object(told, mine, group=comm.group)
    return told


def merged(told: Sequence[Written]) -> list[dict[Any, Any]]:
    """By group, and last for the state, what all owners of its parameters wrote.

    Raises:
        ShardingError: they wrote different values, or numbers that are lost; or the optimizer does
            not treat each parameter by itself.
    """
    if any(each.joint for each in told):
        raise ShardingError(
            "the optimizer updates a parameter otherwise if another one is in its group: it looks "
            "at pairs, or at a norm or a step size over all, of which an owner has a part",
            _REMEDY,
        )
    lost = sorted({name for each in told for name in each.lost})
    if lost:
        raise ShardingError("the optimizer remembers what is lost", _REMEDY, lost)
    out: list[dict[Any, Any]] = []
    places = [f"group {number}" for number in range(len(told[0].entries) - 1)]
    for place, *parts in zip((*places, "the state"), *(each.entries for each in told), strict=True):
        wrote = [part for part in parts if part is not None]
        first: dict[Any, Any] = wrote[0] if wrote else {}
        odd = [
            key
            for part in wrote
            for key in part.keys() | first.keys()
            if key not in part or key not in first or not same(part[key], first[key])
        ]
        if odd:
            raise ShardingError(
                f"owners wrote different values to {place}", _REMEDY, sorted({str(k) for k in odd})
            )
        out.append(first)
    return out
