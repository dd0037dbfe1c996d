"""Gradients that wait for the optimizer in another dtype than their parameters (`grad_dtype`).

torch's Adam takes no other dtype than its parameters', so an optimizer step sees them cast. What
stages 1 and 2 hold apart from the shards is out of date after a step anyhow: its memory is free
for the casts, so that a step holds no more than backward did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerofx.runtime.parameter import local_tensor
from zerofx.torch_private import stated_dtype

if TYPE_CHECKING:
    from zerofx.runtime.params import ParamState


def hold_gradients_in(param: Tensor, dtype: torch.dtype) -> None:
    """Let backward leave `param.grad` in `dtype`, whichever dtype it arrives in."""
    param.grad_dtype = None  # any
    trains = param.requires_grad
    param.requires_grad_(True)  # a frozen one takes no hook, and may train later
    before_users(param, functools.partial(_cast, dtype=dtype))
    param.requires_grad_(trains)


def before_users(param: Tensor, see: Callable[[Tensor], None]) -> None:
    """Let `see` have a parameter whose `.grad` a backward has left before hooks of users do.

    Several see it in the order in which they came.
    """
    param.register_post_accumulate_grad_hook(_First(see))
    hooks: Any = param._post_accumulate_grad_hooks
    for key in [key for key, hook in hooks.items() if not isinstance(hook, _First)]:
        hooks[key] = hooks.pop(key)  # `move_to_end` does not change the order that torch sees


class _First:
    """A hook of zerofx's own."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self._see = see

    def __call__(self, param: Tensor) -> None:
        self._see(param)


def widen_gradients(states: Iterable[ParamState]) -> None:
    """Before an optimizer steps these: cast gradients to the dtypes of their parameters."""
    stepped = [each for each in states if each.param.grad is not None]
    for state in stepped:
        state.drop_resident_copy()
    for state in stepped:
        _cast(state.param, state.spec.dtype)


def narrow_gradients(states: Iterable[ParamState]) -> None:
    """After the step: cast them back."""
    for state in states:
        _cast(state.param, state.spec.grad_dtype)


def take_narrow_gradients(states: Iterable[ParamState]) -> Sequence[tuple[Tensor, Tensor]]:
    """Take gradients away that Dynamo would not trace parameters with.

    Returns:
        Parameters, and what to give back to them.
    """
    held = [
        (state.param, state.param.grad)
        for state in states
        if state.param.grad is not None and state.param.grad.dtype is not state.param.dtype
    ]
    for param, _ in held:
        param.grad = None
    return held


@torch.no_grad()
def _cast(param: Tensor, dtype: torch.dtype) -> None:
    grad = param.grad
    if not isinstance(grad, DTensor):
        return
    if grad.dtype is stated_dtype(grad) is dtype:
        return
    param.grad = DTensor.from_local(
        local_tensor(grad).to(dtype),
        grad.device_mesh,
        grad.placements,
        run_check=False,
        shape=grad.shape,
        stride=grad.stride(),
    )
