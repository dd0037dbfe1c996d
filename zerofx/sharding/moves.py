"""`model.to(…)` of a sharded model: parameters stay the objects they are, with their hooks.

torch swaps a `DTensor` for the converted one, which has no hooks, neither the user's nor ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.runtime.parameter import take_place

Convert = Callable[[Tensor], Tensor]


def apply_around(
    module: nn.Module, params: Iterable[tuple[str, nn.Parameter]], convert: Convert, rest: Any
) -> None:
    """Convert sharded parameters in place, and all else by torch's own means.

    Args:
        module: that holds them.
        params: by attribute name.
        convert: what `nn.Module._apply` was given.
        rest: applies it to what else the module and those below it hold.
    """
    params = list(params)
    module._parameters.update(dict.fromkeys((name for name, _ in params), None))
    try:
        rest()
    finally:
        module._parameters.update(params)
    for _, param in params:
        _convert(param, convert)
        if param.grad is not None:
            _convert(param.grad, convert)


def _convert(value: Tensor, convert: Convert) -> None:
    with torch.no_grad():
        made = convert(value)
    if made is not value:
        take_place(value, made)
