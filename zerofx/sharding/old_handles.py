"""What held the old parameters when a model was sharded: optimizers, lists, hooks, variables.

Optimizers, and lists, sets and dicts of parameters, are edited in place, lists of tuples such as
`list(model.named_parameters())` and values of `model.state_dict()` too. Every other old handle
becomes a `StaleParameter` (`stale`): using it raises and names the parameter, so that nothing is
lost in silence.
"""

from __future__ import annotations

import dataclasses
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from zerofx.runtime.params import ParamState, held_by
from zerofx.sharding.overlaps import Places, is_plain
from zerofx.sharding.stale import Replaced
from zerofx.torch_private import storage_key

Slice = Callable[[Tensor, ParamState], Tensor]
"""Cuts this rank's part out of a full value that lies as the parameter does."""


@dataclasses.dataclass(frozen=True)
class Holders:
    """What is edited when parameters are replaced, and what shows their memory.

    `dicts` have them for keys or values. Of `views`, those in none of these collections raise.
    """

    optimizers: list[Optimizer]
    lists: list[list[Any]]
    sets: list[set[Any]]
    dicts: list[dict[Any, Any]]
    views: list[Tensor]


def holders_of(params: list[nn.Parameter]) -> Holders:
    """Whatever live thing holds any of `params`, or shows their memory."""
    wanted, places = {id(param) for param in params}, Places(params)

    def is_old(part: Any) -> bool:
        return id(part) in wanted or places.shown_by(part) is not None

    # One look at all that lives: gc.get_referrers compares everything with every parameter.
    views: list[Tensor] = []
    found = Holders([], [], [], [], views)
    for thing in gc.get_objects():
        kind: type[Any] = type(thing)
        if kind is list and thing and thing is not views and any(map(_is_tensor, _parts(thing[0]))):
            if any(is_old(part) for item in thing for part in _parts(item)):
                found.lists.append(thing)
        elif kind is set and _is_tensor(next(iter(thing), None)):
            if any(id(item) in wanted for item in list(thing)):
                found.sets.append(thing)
        elif (kind is dict or kind is OrderedDict) and _maps_tensors(thing):
            if any(is_old(part) for item in list(thing.items()) for part in item):
                found.dicts.append(thing)
        elif kind is Tensor:
            if is_old(thing):
                views.append(thing)
        elif issubclass(kind, Optimizer) and any(id(each) in wanted for each in held_by(thing)):
            found.optimizers.append(thing)
    return found


def move_optimizer(optimizer: Optimizer, replaced: Replaced, cut: Slice) -> None:
    """Point `optimizer` at the sharded parameters; its state is sharded along."""
    for group in optimizer.param_groups:
        group["params"][:] = [_new(param, replaced) for param in group["params"]]
    for old in [param for param in optimizer.state if id(param) in replaced]:
        _, state = replaced[id(old)]
        entries = optimizer.state.pop(old)
        like = [key for key, value in entries.items() if _lies_like(key, value, state)]
        entries.update((key, cut(entries[key], state)) for key in like)
        # The same dict, which LBFGS holds while its closure shards the model.
        optimizer.state[state.param] = entries


def cut_state(optimizer: Optimizer, states: Mapping[int, ParamState], cut: Slice) -> None:
    """Shard a state that lies whole: that of one process, loaded after sharding.

    Args:
        optimizer: over sharded parameters.
        states: of these, by `id`.
        cut: makes this rank's part of a full value.
    """
    for param, entries in optimizer.state.items():
        state = states.get(id(param))
        if state is None:
            continue
        whole = _whole(entries, state)
        if not whole:
            return  # `load_state_dict` gives all of them at once
        entries.update((key, cut(entries[key], state)) for key in whole)


def cut_gradients(params: Iterable[Tensor], states: Mapping[int, ParamState], cut: Slice) -> None:
    """Shard gradients that lie whole: those that a loop made itself."""
    for param in params:
        state, grad = states.get(id(param)), param.grad
        if state is not None and grad is not None and not isinstance(grad, DTensor):
            param.grad = cut(grad, state)


def move_attributes(old: nn.Parameter, new: nn.Parameter) -> None:
    """Carry Python attributes and hooks over; handles of the hooks stay good."""
    vars(new).update(vars(old))
    if old._backward_hooks:
        new._backward_hooks = old._backward_hooks
        old._backward_hooks = None
    hooks = getattr(old, "_post_accumulate_grad_hooks", None)
    if hooks:
        # Handles know this dict; what zerofx does to gradients comes before what users do.
        ours, theirs = dict(getattr(new, "_post_accumulate_grad_hooks", None) or {}), dict(hooks)
        hooks.clear()
        hooks.update(ours | theirs)
        new._post_accumulate_grad_hooks = hooks
        setattr(old, "_post_accumulate_grad_hooks", None)  # noqa: B010 (typed as always there)


def move_collections(holders: Holders, replaced: Replaced) -> None:
    """Put the new parameters into collections that hold, or are keyed by, nothing but tensors.

    Lists may hold tuples, which are exchanged. What shows an old parameter's memory, as values of
    `model.state_dict()` do, shows the new one's.
    """
    new = _renewal(replaced)
    for each in holders.lists:
        if all(_is_tensor(item) or type(item) is tuple for item in each):
            each[:] = [_renewed(item, new) for item in each]
    for each in holders.sets:
        if _all_tensors(each):
            items = [new(item) for item in each]
            each.clear()
            each.update(items)
    for each in holders.dicts:
        if _all_tensors(each.values()):
            each.update({key: new(item) for key, item in each.items()})
        if _all_tensors(each):
            items = [(new(key), item) for key, item in each.items()]
            each.clear()
            each.update(items)


def _all_tensors(things: Iterable[Any]) -> bool:
    return all(isinstance(thing, Tensor) for thing in things)


def _is_tensor(thing: Any) -> bool:
    return issubclass(type(thing), Tensor)  # asked of the class: `isinstance` would run proxies


def _maps_tensors(things: Mapping[Any, Any]) -> bool:
    for key, value in things.items():  # looked up, a key would be hashed: the user's code
        return _is_tensor(key) or _is_tensor(value)
    return False


def _place(value: Tensor) -> Any:
    """Which part of which memory a tensor shows, and how."""
    return (storage_key(value), value.storage_offset(), value.shape, value.stride(), value.dtype)


def _renewal(replaced: Replaced) -> Callable[[Any], Any]:
    """Gives a new parameter for an old one, and its `data` for a tensor in the old one's memory."""
    by_place = {_place(old): state.param for old, state in replaced.values()}

    def new(item: Any) -> Any:
        shown = by_place.get(_place(item)) if is_plain(item) else None
        return _new(item, replaced) if shown is None else shown.data

    return new


def _new(item: Any, replaced: Replaced) -> Any:
    entry = replaced.get(id(item))
    return item if entry is None else entry[1].param


def _parts(item: Any) -> tuple[Any, ...]:
    return cast(tuple[Any, ...], item) if type(item) is tuple else (item,)


def _renewed(item: Any, new: Callable[[Any], Any]) -> Any:
    """A tensor, or a tuple, with new parameters for old ones."""
    parts = tuple(map(new, _parts(item)))
    return parts if type(item) is tuple else parts[0]


def _whole(entries: Mapping[str, Any], state: ParamState) -> list[str]:
    """Entries that are plain tensors with the global shape of the parameter."""
    return [k for k, v in entries.items() if type(v) is Tensor and _lies_like(k, v, state)]


def _lies_like(key: str, value: Any, state: ParamState) -> bool:
    # The count of steps is a 0-d tensor, whatever the parameter is.
    return isinstance(value, Tensor) and value.shape == state.spec.shape and key != "step"
