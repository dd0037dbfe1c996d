"""Which dtypes a file asks for, and what it casts for good before training."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zerofx.errors import ConfigError, UnsupportedError
from zerofx.integrations.deepspeed.settings import Settings

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclasses.dataclass(frozen=True)
class Casts:
    """Dtypes that a model is brought to before it is sharded; `None`: those that it has.

    Attributes:
        params: of parameters at rest, and so of gradients and of the optimizer's state.
        buffers: of buffers.
        computation: what 16-bit training computes in.
        exact: patterns of names of buffers which such training keeps in fp32. By default a
            transformers model says itself (`_keep_in_fp32_modules`).
    """

    params: torch.dtype | None = None
    buffers: torch.dtype | None = None
    computation: torch.dtype | None = None
    exact: tuple[str, ...] | None = None

    def apply(self, model: nn.Module) -> None:
        """Cast in place; parameters and buffers stay the same objects."""
        for _, value, dtype in self._left(model):
            value.data = value.data.to(dtype)

    def left_of(self, model: nn.Module) -> list[str]:
        """Names of what `apply` would cast."""
        return [name for name, _, _ in self._left(model)]

    def _left(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        exact = {id(buffer) for buffer in self._exact_buffers(model)}
        params = ((*named, self.params) for named in model.named_parameters())
        buffers = (
            (name, buffer, torch.float32 if id(buffer) in exact else self.buffers)
            for name, buffer in model.named_buffers()
        )
        for name, value, dtype in (*params, *buffers):
            if dtype not in (None, value.dtype) and value.dtype in _DTYPES.values():
                yield name, value, dtype

    def _exact_buffers(self, model: nn.Module) -> Iterator[torch.Tensor]:
        if self.computation is None:
            return
        given = _own_patterns(model, self.computation) if self.exact is None else self.exact
        pattern = re.compile("|".join(each.replace("*", ".*") for each in given))
        for name, buffer in model.named_buffers() if given else ():
            if pattern.search(name):
                yield buffer


def computation_dtype(settings: Settings) -> torch.dtype | None:
    """What is computed in, if that is 16 bits.

    Raises:
        ConfigError: two dtypes are enabled.
    """
    low = [name for name in ("fp16", "bf16") if settings.get(f"{name}.enabled", False)]
    if len(low) == 2:
        raise ConfigError("fp16 and bf16 are both enabled", "enable one of them")
    return _DTYPES[low[0]] if low else None


def casts_of(settings: Settings, computation: torch.dtype | None) -> Casts:
    """What a file casts.

    Args:
        settings: what it asks for.
        computation: see `Casts`.

    Raises:
        ConfigError: keys contradict each other, or name no dtypes.
        UnsupportedError: states are wider than their weights.
    """
    asked = _dtype_at("data_types.param_dtype", settings)
    if asked not in (None, computation or torch.float32):
        raise ConfigError(
            f"data_types.param_dtype is {settings.get('data_types.param_dtype')!r}",
            "enable fp16 or bf16 to match it, or leave it out",
        )
    exact = settings.get("data_types.keep_in_fp32_modules")
    return Casts(
        params=torch.bfloat16 if _keeps_bf16(settings) else None,
        buffers=_dtype_at("data_types.buffer_dtype", settings),
        computation=computation,
        exact=None if exact is None else tuple(exact),
    )


def _keeps_bf16(settings: Settings) -> bool:
    weights, states = "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"
    if settings.get(weights, False) and not settings.get(states, False):
        raise UnsupportedError(
            f"{weights} without {states}: fp32 states of 16-bit weights need offloading",
            f"say true to both, or leave_out={[weights]}",
        )
    if settings.get(states, False) and not settings.get(weights, False):
        raise ConfigError(f"{states} needs {weights}", "say true to both, or to none")
    return settings.get(weights, False)


def reduce_dtype(settings: Settings) -> torch.dtype | None:
    """The wider of what gradients travel in and what they are summed in: here these are one."""
    asked = [
        _dtype_at("communication_data_type", settings),
        _dtype_at("data_types.grad_accum_dtype", settings),
    ]
    if settings.get("sequence_parallel_size", 1) > 1:
        sequence = "seq_parallel_communication_data_type"
        asked.append(_dtype_at(sequence, settings) or torch.float32)
    given = [dtype for dtype in asked if dtype is not None]
    return functools.reduce(torch.promote_types, given) if given else None


def autocast_dtype(settings: Settings) -> torch.dtype | None:
    """What `torch_autocast` computes in, if it is enabled."""
    if not settings.get("torch_autocast.enabled", False):
        return None
    return _dtype_at("torch_autocast.dtype", settings) or torch.bfloat16


def _dtype_at(path: str, settings: Settings) -> torch.dtype | None:
    if settings.get(path) is None:
        return None
    name: str = settings.get(path)
    short = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16"}
    plain = name.lower().removeprefix("torch.")
    dtype = _DTYPES.get(short.get(plain, plain.replace("bfloat", "bf")))
    if dtype is None:
        raise ConfigError(f"{path} is {name!r}", f"use one of {', '.join(_DTYPES)}")
    return dtype


def _own_patterns(model: nn.Module, computation: torch.dtype | None) -> Sequence[str]:
    """Those that transformers' classes list, each below the module that has them."""
    lists = ["_keep_in_fp32_modules_strict"]
    lists += ["_keep_in_fp32_modules"] * (computation is torch.float16)
    return [
        f"^{re.escape(name)}\\..*{each}" if name else each
        for name, module in model.named_modules()
        for listed in lists
        for each in getattr(module, listed, None) or ()
    ]
