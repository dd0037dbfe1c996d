"""Casts at the border of a model: floating-point inputs and outputs of its forward.

They are ordinary hooks of the root, so that they hold with and without a compiler; where Dynamo
traces the root's call (`model.compile()`, torch's containers, compiled functions) they are part of
the graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.config import ZeroConfig
from zerofx.torch_private import map_tensors, tensors_in


def cast_border(model: nn.Module, config: ZeroConfig) -> None:
    """Register the hooks that `config` asks for; those of a part that was sharded first go."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if _is_ours(hook)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    if config.param_dtype is not None and config.cast_forward_inputs:
        hook = functools.partial(_cast_inputs, config.param_dtype)
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    if config.output_dtype is not None:
        model.register_forward_hook(functools.partial(_cast_outputs, config.output_dtype))


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, functools.partial) and hook.func in (_cast_inputs, _cast_outputs)


def param_dtypes(model: nn.Module, asked: torch.dtype | None) -> dict[int, torch.dtype | None]:
    """What option `param_dtype` asks of each plain parameter of a model, by its `id`."""
    dtypes: dict[int, torch.dtype | None] = {}
    for module in model.modules():
        dtype = param_dtype_in(module, asked)
        # A module's own `named_parameters` may leave some out.
        for _, param in nn.Module.named_parameters(module, recurse=False):
            dtypes[id(param)] = dtypes.get(id(param), dtype) and dtype  # `None` where tied to one
    return dtypes


def param_dtype_in(module: nn.Module, asked: torch.dtype | None) -> torch.dtype | None:
    """What option `param_dtype` asks of a module's own parameters.

    Kernels of BatchNorm take weights in the dtype of the running statistics, and inputs in another.
    These are buffers, which no option casts; so its weights stay as they are, too.
    """
    mean = dict(nn.Module.named_buffers(module, recurse=False)).get("running_mean")
    return asked if mean is None or mean.dtype is asked else None


def needs_cast(values: Any, dtype: torch.dtype) -> bool:
    """Whether a nest of values holds a floating-point tensor of another dtype."""
    return any(_differs(value, dtype) for value in tensors_in(values))


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any
) -> tuple[Any, dict[str, Any]]:
    return _cast(args, dtype), _cast(kwargs, dtype)


def _cast_outputs(dtype: torch.dtype, module: nn.Module, args: Any, outputs: Any) -> Any:
    return _cast(outputs, dtype)


def _cast(values: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda value: value.to(dtype) if _differs(value, dtype) else value, values)


def _differs(value: Tensor, dtype: torch.dtype) -> bool:
    return value.is_floating_point() and value.dtype is not dtype
