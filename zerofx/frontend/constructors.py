"""Constructors on fake tensors, which have no values: what they read is known all the same.

`trunc_normal_` asks whether a draw is to be repeated, and stochastic depth takes its rates from a
`linspace`, number by number. And what others remember of parameters keeps a constructor from
casting or moving them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zerofx.torch_private import DispatchMode, forget_results, init_that_asks, with_values

_RANGES = (torch.ops.aten.arange, torch.ops.aten.linspace, torch.ops.aten.logspace)
_MOST_VALUES = 4096


def construct(build: Callable[[], nn.Module]) -> nn.Module:
    """`build()` in the fake mode that is on, where it would fail by itself.

    Raises:
        DataDependentOutputException: a constructor reads a value that is drawn or computed.
    """
    with _ParametersCanBeCast(), _NothingDrawn(), _RangesHaveValues():
        return build()


def cast_params(model: nn.Module, dtype: torch.dtype) -> None:
    """Give fp32 parameters another dtype; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            if param.dtype is torch.float32 and id(param) not in made:
                made[id(param)] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
            if id(param) in made:
                setattr(module, name, made[id(param)])


class _NothingDrawn(TorchFunctionMode):
    """Functions of `nn.init` that draw until values fit leave a tensor that is on `meta` alone."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return init_that_asks(func) is not None or func(*args, **(kwargs or {}))


class _ParametersCanBeCast(TorchFunctionMode):
    """`model.to(dtype)` finds no weak references to the parameters that it swaps."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        forget_results(result)
        return result


class _RangesHaveValues(DispatchMode):
    """Small ranges on the CPU have values beside their shapes, so that `item()` gives them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fake = func(*args, **kwargs)
        if func.overloadpacket not in _RANGES or fake.device.type != "cpu":
            return fake
        if fake.numel() > _MOST_VALUES:
            return fake
        return with_values(fake, lambda: func(*args, **kwargs))
