"""Whether an optimizer treats each parameter by itself, as it must where owners step apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_STEPS = ((1.0, 1000.0), (-0.5, 1.0), (2.0, 30.0))
"""Factors of the gradients of a parameter and of its companion, which weighs on norms over both.

They differ from step to step: many updates are the same for a gradient of any scale.
"""


def looks_at_others(
    make: Callable[[list[dict[str, Any]]], Optimizer],
    group: Mapping[str, Any],
    value: Tensor,
    grad: Tensor,
) -> bool:
    """Whether the first updates of a parameter are others beside a companion in its group.

    So it is with norms or step sizes over all parameters (AdaGC), and with pairs (LoRA-RITE).
    Those that draw random numbers are not told apart. Runs on copies, in fp32 at least.

    Args:
        make: builds the optimizer from groups.
        group: options of the parameter's.
        value: of the parameter.
        grad: of the parameter.
    """
    options = {**group, "lr": 1e-3} if "lr" in group and not group["lr"] else group
    with torch.random.fork_rng([value.device] if value.is_cuda else []):
        state = _random_state(value)
        alone = _update(make, options, value, grad, beside=False)
        if not torch.equal(state, _random_state(value)):
            return False
        beside = _update(make, options, value, grad, beside=True)
    if alone is None or beside is None:
        # What fails in both ways fails in the step as well, with its own error.
        return alone is None and beside is not None
    unlike = (alone - beside).abs().max().item()
    rounding = 4 * torch.finfo(alone.dtype).eps * value.abs().max().item()
    return unlike > 0.01 * alone.abs().max().item() + rounding


def _random_state(like: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.get_rng_state()


def _update(
    make: Callable[[list[dict[str, Any]]], Optimizer],
    group: Mapping[str, Any],
    value: Tensor,
    grad: Tensor,
    *,
    beside: bool,
) -> Tensor | None:
    """What the first steps add to `value`; `None` if they fail."""
    at_least = torch.promote_types(value.dtype, torch.float32)
    value, grad = value.to(at_least), grad.to(at_least)
    params, grads = [value.clone()], [grad]
    if beside:
        # Of the transposed shape, as one factor of a product is beside the other.
        params.append(value.t().clone() if value.ndim == 2 else value.clone())
        grads.append(grad.t() if value.ndim == 2 else grad)
    try:
        options = {key: each for key, each in group.items() if key != "params"}
        optimizer = make([{**copy.deepcopy(options), "params": params}])
        for factors in _STEPS:
            for param, slope, factor in zip(params, grads, factors, strict=False):
                param.grad = factor * slope
            optimizer.step()
    except Exception:  # its author's: anything
        return None
    return params[0] - value
