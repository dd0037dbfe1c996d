"""What an optimizer writes down while it steps that no parameter owns: counts of steps, mostly.

Owners step apart, so each writes to groups and to a state of its own. Where all write the same, it
is everybody's; where they do not, the optimizer has looked at several parameters at once.
"""

from __future__ import annotations

import collections
import dataclasses
import io
from collections.abc import Collection, Mapping, Sequence
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
        error: what it raised instead.
    """

    entries: list[dict[Any, Any] | None]
    lost: list[str]
    joint: bool = False
    tells: bool = False
    error: str = ""

    @property
    def anything(self) -> bool:
        """Whether it wrote anything at all."""
        return any(self.entries) or bool(self.lost)


_CONTAINERS = (Mapping, list, set, collections.deque)


def memory_of(optimizer: Optimizer) -> dict[str, Any]:
    """The attributes that count or measure, or hold what does; flags are none."""
    kinds = (int, float, Tensor, *_CONTAINERS)
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, kinds) and not isinstance(value, bool)
        if name not in ("state", "param_groups")
    }


def seen(entries: Mapping[Any, Any], params: Collection[Tensor]) -> dict[Any, Any]:
    """Values as they are now, to compare with later ones; state of parameters aside.

    Args:
        entries: of a group, of the state, or attributes.
        params: which are written to, and are no memory.
    """
    known = frozenset(map(id, params))
    return {key: _now(value, known) for key, value in everyones(entries).items() if key != "params"}


def _now(value: Any, params: frozenset[int], within: tuple[int, ...] = ()) -> Any:
    """Containers by what they hold, tensors with the number of writes to them."""
    if isinstance(value, Tensor):
        return value, 0 if id(value) in params else value._version
    if not isinstance(value, (*_CONTAINERS, tuple)) or id(value) in within:
        return value
    held: Any = value.items() if isinstance(value, Mapping) else value
    return type(value), [_now(each, params, (*within, id(value))) for each in held]


def everyones(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Entries of an optimizer's state under keys that are no parameters."""
    return {key: entry for key, entry in state.items() if not isinstance(key, Tensor)}


def changes(
    before: Mapping[Any, Any], after: Mapping[Any, Any], params: Collection[Tensor]
) -> dict[Any, Any]:
    """What is new, has another value, or was written to since it was `seen`."""
    return {
        key: after[key]
        for key, now in seen(after, params).items()
        if not (key in before and same(before[key], now))
    }


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal; tensors bit for bit."""
    if one is other:
        return True  # a learning rate on a GPU: no wait for its number
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tell(mine: Any, comm: Comm) -> list[Any]:
    """What every rank along an axis passes; all of them must call this.

    Tensors arrive on a device of the kind that they come from, but on this rank's.
    """
    packed = io.BytesIO()
    torch.save(mine, packed)
    told: list[Any] = [None] * comm.size
    dist.all_gather_object(told, packed.getvalue(), group=comm.group)
    return [
        torch.load(io.BytesIO(each), map_location=_on_own_device, weights_only=False)
        for each in told
    ]


def _on_own_device(storage: Any, sender: str) -> Any:
    kind = torch.device(sender).type
    return torch.serialization.default_restore_location(storage, kind)


def merged(told: Sequence[Written]) -> list[dict[Any, Any]]:
    """By group, and last for the state, what all owners of its parameters wrote.

    Raises:
        ShardingError: they wrote different values, or numbers that are lost; or the optimizer does
            not treat each parameter by itself, or failed.
    """
    errors = [each.error for each in told if each.error]
    if errors:
        raise ShardingError(
            "a step of the optimizer failed where parameters have their owner",
            "mend what that rank says; no parameter has changed",
            errors,
        )
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
