"""Whether an optimizer treats each parameter by itself, as it must where owners step apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_AS_MUCH = 1000
"""How much larger a companion's gradient is: it outweighs in any norm or mean over both."""


def looks_at_others(
    make: Callable[[list[dict[str, Any]]], Optimizer],
    group: Mapping[str, Any],
    value: Tensor,
    grad: Tensor,
) -> bool:
    """Whether the first update of a parameter is another one beside a companion in its group.

    So it is with norms or step sizes over all parameters (AdaGC), and with pairs (LoRA-RITE).
    Both updates draw the same random numbers. Runs on copies, in fp32 at least.

    Args:
        make: builds the optimizer from groups.
        group: options of the parameter's.
        value: of the parameter.
        grad: of the parameter.
    """
    options = {**group, "lr": 1e-3} if "lr" in group and not group["lr"] else group
    alone = _update(make, options, value, grad, beside=False)
    beside = _update(make, options, value, grad, beside=True)
    if alone is None or beside is None:
        # What fails in both ways fails in the step as well, with its own error.
        return alone is None and beside is not None
    unlike = (alone - beside).abs().max().item()
    rounding = 4 * torch.finfo(alone.dtype).eps * value.abs().max().item()
    return unlike > 0.01 * alone.abs().max().item() + rounding


def _update(
    make: Callable[[list[dict[str, Any]]], Optimizer],
    group: Mapping[str, Any],
    value: Tensor,
    grad: Tensor,
    *,
    beside: bool,
) -> Tensor | None:
    """What a first step adds to `value`; `None` if it fails."""
    at_least = torch.promote_types(value.dtype, torch.float32)
    before = value.to(at_least)
    params = [before.clone() for _ in range(1 + beside)]
    for param, scale in zip(params, (1, _AS_MUCH), strict=False):
        param.grad = scale * grad.to(at_least)
    try:
        with torch.random.fork_rng([value.device] if value.is_cuda else []):
            make([{**group, "params": params}]).step()
    except Exception:  # its author's: anything
        return None
    return params[0] - before
