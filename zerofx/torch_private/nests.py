"""Tensors in what functions take and give: nests of containers, dataclasses among them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree


def tensors_in(values: Any) -> list[Tensor]:
    """The tensors in a nest of lists, tuples, dicts, dataclasses and classes that torch knows."""
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(type(leaf)):
            found += tensors_in(_fields(leaf))
    return found


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """The same nest, as `tensors_in` sees it, with `function` applied to its tensors."""

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if not dataclasses.is_dataclass(type(leaf)) or not tensors_in(leaf):
            return leaf
        # Not by its constructor, which may do more, or take other things than its fields.
        made = copy.copy(leaf)
        for name, value in _fields(leaf).items():
            object.__setattr__(made, name, map_tensors(function, value))  # it may be frozen
        return made

    return _pytree.tree_map(mapped, values)


def _fields(value: Any) -> dict[str, Any]:
    names = [each.name for each in dataclasses.fields(value)]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
