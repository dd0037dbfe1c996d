"""What a file does not allow to happen in a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zerofx.errors import ConfigError
from zerofx.runtime.handles import states_by_param


def refuse_uncast(params: Iterable[Tensor], dtype: torch.dtype) -> None:
    """Parameters at rest have the dtype that the file wants."""
    wide = [p for p in params if p.is_floating_point() and p.dtype.itemsize > dtype.itemsize]
    if wide:
        raise ConfigError(
            f"the file wants parameters in {dtype} at rest",
            "call recipe.cast_model(model) before the model is sharded",
            _names(wide),
        )


def refuse_unused(params: Iterable[Tensor]) -> None:
    """Each parameter that is trained has a gradient."""
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
