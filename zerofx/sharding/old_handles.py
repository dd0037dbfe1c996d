"""What held the old parameters when a model was sharded: optimizers, lists, hooks, variables.

Optimizers, and lists, sets and dicts of parameters, are edited in place. Every other old handle
becomes a `StaleParameter`: using it raises and names the parameter, so that nothing is lost in
silence.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerofx.errors import StaleHandleError
from zerofx.runtime.params import ParamState
from zerofx.torch_private import storage_key

Replaced = Mapping[int, tuple[nn.Parameter, ParamState]]
"""Old parameter and its new state, by the old one's `id`."""

Slice = Callable[[Tensor, ParamState], Tensor]
"""Cuts this rank's part out of a full value that lies as the parameter does."""


class StaleParameter(nn.Parameter):
    """A parameter object from before its model was sharded; any use of it raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Refuse whatever is done with the handle.

        Raises:
            StaleHandleError: always.
        """
        names = [
            arg.__dict__.get("_zerofx_name", "?") for arg in args if isinstance(arg, StaleParameter)
        ]
        raise StaleHandleError(
            "a parameter object, or a view of one, from before zerofx sharded the model is used "
            "after it",
            "take it again from model.parameters(), or shard before: "
            "zerofx.shard(model, ZeroConfig(stage=…)); compute views of parameters in forward",
            names,
        )

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"StaleParameter({self.__dict__.get('_zerofx_name', '?')!r})"

    def __hash__(self) -> int:
        return id(self)


@dataclasses.dataclass(frozen=True)
class Holders:
    """What is edited when parameters are replaced; `dicts` have them for keys or values."""

    optimizers: list[Optimizer]
    lists: list[list[Any]]
    sets: list[set[Any]]
    dicts: list[dict[Any, Any]]


def holders_of(params: list[nn.Parameter]) -> Holders:
    """Whatever live thing holds any of `params`."""
    wanted = {id(param) for param in params}
    # One look at all that lives: gc.get_referrers compares everything with every parameter.
    found = Holders([], [], [], [])
    for thing in gc.get_objects():
        kind: type[Any] = type(thing)
        if kind is list and thing and issubclass(type(thing[0]), Tensor):
            if any(id(item) in wanted for item in thing):
                found.lists.append(thing)
        elif kind is set and issubclass(type(next(iter(thing), None)), Tensor):
            if any(id(item) in wanted for item in list(thing)):
                found.sets.append(thing)
        elif kind is dict and any(map(_is_tensor, next(iter(thing.items()), ()))):
            if any(id(part) in wanted for item in list(thing.items()) for part in item):
                found.dicts.append(thing)
        elif issubclass(kind, Optimizer) and _holds(thing, wanted):
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
    """Put the new parameters into collections that hold, or are keyed by, nothing but tensors."""
    for each in holders.lists:
        if _all_tensors(each):
            each[:] = [_new(item, replaced) for item in each]
    for each in holders.sets:
        if _all_tensors(each):
            items = [_new(item, replaced) for item in each]
            each.clear()
            each.update(items)
    for each in holders.dicts:
        if _all_tensors(each.values()):
            each.update({key: _new(item, replaced) for key, item in each.items()})
        if _all_tensors(each):
            items = [(_new(key, replaced), item) for key, item in each.items()]
            each.clear()
            each.update(items)


class StaleView(StaleParameter):
    """An attribute that was a view of a parameter. Copies of the model bring it along."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleView:
        return _stale_view(vars(self)["_zerofx_name"])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _stale_view, (vars(self)["_zerofx_name"],)


def make_views_stale(model: nn.Module, replaced: Replaced) -> None:
    """Let use of attributes raise that view old parameters: they would keep the first values.

    Those that are assigned anew before they are read, as by old-style `spectral_norm`, are none.
    """
    names = {storage_key(old): state.spec.name for old, state in replaced.values()}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            where = f"{path}.{attribute}" if path else attribute
            if isinstance(value, Tensor):
                vars(module)[attribute] = _stale_if_view(value, names, where)
            elif type(value) is list:
                value[:] = [_stale_if_view(each, names, where) for each in value]
            elif type(value) is dict and attribute not in _OF_TORCH:
                value.update((k, _stale_if_view(v, names, where)) for k, v in value.items())


_OF_TORCH = ("_parameters", "_buffers", "_modules")


def _stale_if_view(value: Any, names: Mapping[Any, str], where: str) -> Any:
    if type(value) is not Tensor or value.layout is not torch.strided:
        return value
    name = names.get(storage_key(value))
    return value if name is None else _stale_view(f"{where}, a view of {name}")


def _stale_view(name: str) -> StaleView:
    stale = nn.Parameter(torch.empty(0), requires_grad=False)
    vars(stale)["_zerofx_name"] = name
    stale.__class__ = StaleView
    return cast(StaleView, stale)


def make_stale(old: nn.Parameter, name: str) -> None:
    """Free the full value and make any further use of `old` an error."""
    old.grad = None
    old.data = torch.empty(0, dtype=old.dtype, device=old.device)
    vars(old).clear()
    vars(old)["_zerofx_name"] = name
    old.__class__ = StaleParameter


def _holds(optimizer: Optimizer, wanted: set[int]) -> bool:
    groups = optimizer.__dict__.get("param_groups", ())  # it may be half built
    return any(id(param) in wanted for group in groups for param in group["params"])


def _all_tensors(things: Iterable[Any]) -> bool:
    return all(isinstance(thing, Tensor) for thing in things)


def _is_tensor(thing: Any) -> bool:
    return issubclass(type(thing), Tensor)  # asked of the class: `isinstance` would run proxies


def _new(item: Any, replaced: Replaced) -> Any:
    entry = replaced.get(id(item))
    return item if entry is None else entry[1].param


def _whole(entries: Mapping[str, Any], state: ParamState) -> list[str]:
    """Entries that are plain tensors with the global shape of the parameter."""
    return [k for k, v in entries.items() if type(v) is Tensor and _lies_like(k, v, state)]


def _lies_like(key: str, value: Any, state: ParamState) -> bool:
    # The count of steps is a 0-d tensor, whatever the parameter is.
    return isinstance(value, Tensor) and value.shape == state.spec.shape and key != "step"
