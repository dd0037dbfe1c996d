"""Largest and smallest numbers of `DTensor`s of which some ranks hold no rows, or nan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from zerofx.torch_private.handlers import HANDLERS, torchs_way, without_parts

_aten = torch.ops.aten
_NEUTRAL: dict[Any, Callable[[tuple[Any, ...]], float | None]] = {
    _aten.max.default: lambda args: -math.inf,
    _aten.amax.default: lambda args: -math.inf,
    _aten.min.default: lambda args: math.inf,
    _aten.amin.default: lambda args: math.inf,
    _aten.linalg_vector_norm.default: lambda args: _of_norm(*args[1:2]),
    _aten._foreach_norm.Scalar: lambda args: _of_norm(*args[1:2]),
    _aten._foreach_max.default: lambda args: -math.inf,
}
"""What changes no result; `None`: torch knows an answer of its own for ranks without rows."""

_DIMS = {_aten.amax.default: 1, _aten.amin.default: 1, _aten.linalg_vector_norm.default: 2}
"""Where operations say what they reduce; by default all of it."""


def find_extremes() -> None:
    """Let largest and smallest numbers, and their places, be those of whole tensors."""
    HANDLERS.update(dict.fromkeys(_NEUTRAL, _find))
    for op in (_aten.argmax.default, _aten.argmin.default):
        # Their own handlers ask each rank for its place. By torch's rules they gather what they
        # search.
        HANDLERS.pop(op, None)


def _of_norm(order: float = 2) -> float | None:
    return {math.inf: 0.0, -math.inf: math.inf}.get(order)


def _find(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A rank without rows answers what changes no result; torch's kernels refuse to."""
    given, *rest = args
    if isinstance(given, list | tuple) and not all(isinstance(each, DTensor) for each in given):
        # Gradients that a loop made itself beside others: torch takes no such list.
        return [op([each], *rest, **kwargs)[0] for each in given]
    neutral = _NEUTRAL[op](args)
    if neutral is not None:
        at = _DIMS.get(op, len(args))
        dims = args[at] if at < len(args) else None
        args = (_filled(args[0], neutral, dims), *args[1:])
    found = torchs_way(op, args, kwargs)
    if neutral is None:
        return found
    most = torch.amin if neutral == math.inf else torch.amax
    return [_met(each, most) for each in found] if isinstance(found, list) else _met(found, most)


def _met(found: Any, most: Callable[..., Tensor]) -> Any:
    """What all ranks found, met on each: gloo's own maximum forgets nan of all but the first."""
    if not (isinstance(found, DTensor) and found.is_floating_point()):
        return found
    given, mesh = found.placements, found.device_mesh
    whole = without_parts(given)
    if whole == list(given):
        return found
    # Along a dimension more, in which ranks lie one after another.
    apart = [Shard(found.ndim) if how.is_partial() else how for how in given]
    each = DTensor.from_local(found._local_tensor[..., None], mesh, apart, run_check=False)
    value = most(each.redistribute(mesh, whole)._local_tensor, -1)
    shape, stride = found.shape, found.stride()
    return DTensor.from_local(value, mesh, whole, run_check=False, shape=shape, stride=stride)


def _filled(value: Any, neutral: float, dims: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_filled(each, neutral, dims) for each in value]
    local: Tensor | None = getattr(value, "_local_tensor", None)
    if local is None or local.numel() or not value.numel() or not local.is_floating_point():
        return value
    if dims and all(local.shape[dim] for dim in dims):
        return value  # there are numbers for each result
    shape = [size or 1 for size in local.shape]
    return DTensor(local.new_full(shape, neutral), value._spec, requires_grad=False)
