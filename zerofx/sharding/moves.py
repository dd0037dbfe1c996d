"""`model.to(…)` of a sharded model: parameters stay the objects they are, with their hooks.

torch swaps a `DTensor` for the converted one, which has no hooks, neither the user's nor ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from zerofx.runtime.ownership import owner_of
from zerofx.runtime.parameter import take_place

Convert = Callable[[Tensor], Tensor]


def apply_around(
    module: nn.Module,
    params: Mapping[str, nn.Parameter],
    convert: Convert,
    rest: Callable[[], object],
) -> None:
    """Convert sharded parameters in place, and all else by torch's own means.

    Args:
        module: that holds them.
        params: by attribute name.
        convert: what `nn.Module._apply` was given.
        rest: applies it to what else the module and those below it hold.
    """
    module._parameters.update(dict.fromkeys(params))
    try:
        rest()
    finally:
        module._parameters.update(params)
    for param in params.values():
        _convert(param, convert)
        if param.grad is not None:
            _convert(param.grad, convert)


def _convert(value: Tensor, convert: Convert) -> None:
    with torch.no_grad():
        made = convert(value)
    if made is not value:
        take_place(value, made)
        if (owner := owner_of(value)) is not None:  # some ranks may see nothing of it
            owner.state.domain.session.forget_values(owner.state)
