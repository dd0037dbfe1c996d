"""What a file demands of parameters when gradients are there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zerofx.errors import ConfigError
from zerofx.runtime.handles import states_by_param


def check_gradients(
    params: Sequence[Tensor], at_rest: torch.dtype | None, allows_unused: bool
) -> None:
    """See that parameters are no wider than they may be at rest, and that they have gradients.

    Raises:
        ConfigError: names those that are wider, or have none.
    """
    if at_rest is not None:
        _refuse_uncast(params, at_rest)
    if not allows_unused:
        _refuse_unused(params)


def _refuse_uncast(params: Iterable[Tensor], dtype: torch.dtype) -> None:
    wide = [p for p in params if p.is_floating_point() and p.dtype.itemsize > dtype.itemsize]
    if wide:
        raise ConfigError(
            f"the file wants parameters in {dtype} at rest",
            "call recipe.cast_model(model) before the model is sharded",
            _names(wide),
        )


def _refuse_unused(params: Iterable[Tensor]) -> None:
    unused = [p for p in params if p.requires_grad and p.grad is None]
    if unused:
        raise ConfigError(
            "parameters have no gradient, and the file says ignore_unused_parameters: false",
            "freeze them, or say true",
            _names(unused),
        )


def _names(params: Iterable[Tensor]) -> list[str]:
    known = {param: state.spec.name for param, state in states_by_param().items()}
    return [known.get(id(param), f"of shape {tuple(param.shape)}") for param in params]
