"""LoRA of bare parameters, `LoraConfig(target_parameters=…)`, in forwards that Dynamo traces."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.func import functional_call


class _TracedWrapper(ParamWrapper):
    """Computes the adapted value for a call, where PEFT registers a parametrization for it."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        active = [name for name in self.active_adapters if name in self.lora_A]
        if self.disable_adapters or self.merged or not active:
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        value = self.get_param()
        for name in active:
            value = value + self.get_delta_weight(name)
        inner, path = self.base_layer, self.parameter_name
        while isinstance(inner, ParamWrapper):  # one for each parameter of a module
            inner, path = inner.base_layer, f"base_layer.{path}"
        return functional_call(self.base_layer, {path: value}, (x, *args), kwargs)


def trace_target_parameters(model: nn.Module) -> nn.Module:
    """Let LoRA of bare parameters be computed inside the program, in place.

    PEFT registers and removes a parametrization in each forward, which Dynamo leaves to Python and
    a sharded model refuses. Names, saved adapters and merging stay as they are. Call it after
    `get_peft_model` or `add_adapter`, before the first forward.

    Args:
        model: adapted by PEFT, perhaps with `target_parameters`.

    Returns:
        The model.
    """
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = _TracedWrapper
    return model
