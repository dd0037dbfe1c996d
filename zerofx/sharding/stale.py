"""Old handles that cannot follow: they become `StaleParameter`s, whose use raises by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from zerofx.errors import StaleHandleError
from zerofx.runtime.params import ParamState
from zerofx.sharding.overlaps import Places
from zerofx.torch_private import is_in_a_graph, set_data

Replaced = Mapping[int, tuple[nn.Parameter, ParamState]]
"""Old parameter and its new state, by the old one's `id`."""


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


class StaleView(StaleParameter):
    """What was a view of a parameter. Copies of a model bring its attributes along."""

    def __deepcopy__(self, memo: dict[int, Any]) -> StaleView:
        return _stale_view(vars(self)["_zerofx_name"])

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _stale_view, (vars(self)["_zerofx_name"],)


def make_views_stale(views: Iterable[Tensor], replaced: Replaced) -> None:
    """Let use of tensors raise that show old parameters' memory: they would keep its values."""
    names = _names_by_view(replaced)
    for view in views:
        vars(view)["_zerofx_name"] = f"a view of {names(view)}"
        view.__class__ = StaleView


def make_attributes_stale(model: nn.Module, replaced: Replaced) -> None:
    """The same for attributes of modules, by their names.

    Those that are assigned anew before they are read, as by old-style `spectral_norm`, are none.
    """
    names = _names_by_view(replaced)
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


def _names_by_view(replaced: Replaced) -> Callable[[Any], str | None]:
    """Gives the name of the parameter that a tensor shows; `None` for anything else."""
    places = Places(old for old, _ in replaced.values())

    def name(thing: Any) -> str | None:
        shown = places.shown_by(thing)
        return None if shown is None else replaced[id(shown)][1].spec.name

    return name


def _stale_if_view(value: Any, names: Callable[[Any], str | None], where: str) -> Any:
    name = names(value)
    return value if name is None else _stale_view(f"{where}, a view of {name}")


def _stale_view(name: str) -> StaleView:
    stale = nn.Parameter(torch.empty(0), requires_grad=False)
    vars(stale)["_zerofx_name"] = name
    stale.__class__ = StaleView
    return cast(StaleView, stale)


def _refuse_gradient(name: str, grad: Tensor) -> None:
    raise StaleHandleError(
        "a backward reaches a parameter through what was computed before zerofx sharded the model, "
        "as it does in the first forward of what torch.compile returned",
        "compute penalties after that forward, or shard before: "
        "zerofx.shard(model, ZeroConfig(stage=…))",
        [name],
    )


def make_stale(old: nn.Parameter, name: str) -> None:
    """Free the full value and make any further use of `old` an error.

    What was computed from it may have its backward still to come: that needs the value, and ends
    in an error where its gradient arrives.
    """
    old.grad = None
    free = functools.partial(set_data, old, torch.empty(0, dtype=old.dtype, device=old.device))
    if old.requires_grad and is_in_a_graph(old, free):
        old.register_hook(functools.partial(_refuse_gradient, name))
    else:
        free()
    vars(old).clear()
    vars(old)["_zerofx_name"] = name
    old.__class__ = StaleParameter
