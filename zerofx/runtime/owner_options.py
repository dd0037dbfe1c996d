"""What an optimizer writes down outside of its state while it steps: counts of steps, mostly.

Owners step apart, so each writes to groups of its own. Where all write the same, it is everybody's;
where they do not, the optimizer has looked at several parameters at once.
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
    "remember in their state or in param_groups; train without sharding optimizer states, or "
    "choose another one"
)


@dataclasses.dataclass(frozen=True)
class Written:
    """What one rank's step wrote.

    Attributes:
        options: by group, those that are new or changed; `None` where it owns nothing.
        attributes: numbers of the optimizer itself that changed, by name.
    """

    options: list[dict[str, Any] | None]
    attributes: list[str]

    @property
    def anything(self) -> bool:
        """Whether it wrote anything at all."""
        return any(self.options) or bool(self.attributes)


def numbers_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that count or measure."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What is new or has another value; parameters aside."""
    return {
        key: value
        for key, value in after.items()
        if key != "params" and not (key in before and same(before[key], value))
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


def merged(told: Sequence[Written]) -> list[dict[str, Any]]:
    """By group, the options that all owners of its parameters wrote.

    Raises:
        ShardingError: they wrote different values, or numbers that are lost.
    """
    lost = sorted({name for each in told for name in each.attributes})
    if lost:
        raise ShardingError("the optimizer counts on itself, which is lost", _REMEDY, lost)
    out: list[dict[str, Any]] = []
    for parts in zip(*(each.options for each in told), strict=True):
        wrote = [part for part in parts if part is not None]
        first: dict[str, Any] = wrote[0] if wrote else {}
        odd = [
            key
            for part in wrote
            for key in part.keys() | first.keys()
            if key not in part or key not in first or not same(part[key], first[key])
        ]
        if odd:
            raise ShardingError(
                f"owners wrote different values to group {len(out)}", _REMEDY, sorted({*odd})
            )
        out.append(first)
    return out
