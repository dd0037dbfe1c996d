"""What torch computes wrongly of `DTensor`s: reductions, and the gradient of a selection."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Partial

from zerofx.torch_private.handlers import HANDLERS, added_up, torchs_way

_aten = torch.ops.aten
_LOSSES = (
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "mse_loss"),
    *("smooth_l1_loss", "soft_margin_loss"),
)
_SCANS = (_aten.cumsum.default, _aten.cumprod.default, _aten.logcumsumexp.default)
_OVER_DIMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.dim, _aten.nansum.default)
_ANY = (_aten.any.default, _aten.any.dim, _aten.any.dims)
_MEAN, _SUM = 1, 2
"""As operations number `reduction=`."""


def reduce_all_rows() -> None:
    """Let losses, running sums, sums of norms and over `dim=[]`, and `any` be of whole tensors."""
    for name in (each for loss in _LOSSES for each in (loss, f"{loss}_backward")):
        if (packet := getattr(_aten, name, None)) is not None:
            HANDLERS[packet.default] = _mean
    HANDLERS.update(dict.fromkeys(_SCANS, _scan))
    HANDLERS.update(dict.fromkeys(_OVER_DIMS, _reduce))
    HANDLERS.update(dict.fromkeys(_ANY, _any))
    HANDLERS[_aten.select_backward.default] = _selected


def _mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch averages the means of ranks, whatever they hold, and gives each its whole gradient."""
    expected = op._schema.arguments
    given = {argument.name: argument.default_value for argument in expected}
    given |= dict(zip(given, args, strict=False)) | kwargs
    if given["reduction"] != _MEAN:
        return torchs_way(op, args, kwargs)
    given["reduction"], numel = _SUM, given["self"].numel()
    if "grad_output" in given:
        given["grad_output"] = given["grad_output"] / numel
        return torchs_way(op, tuple(given.values()), {})
    return torchs_way(op, tuple(given.values()), {}) / numel


def _scan(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch does not know the dimension of rows by a negative number."""
    value, dim, *rest = args
    return torchs_way(op, (value, dim % max(value.ndim, 1), *rest), kwargs)


def _reduce(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """No dimensions are all of them, as backward of `amax()` has it; torch takes none of them.

    And it adds norms of rows up before it has made norms of columns of them.
    """
    value, *rest = args
    if rest and rest[0] is not None and not len(rest[0]):
        rest[0] = list(range(value.ndim))
    if any(how.is_partial() and type(how) is not Partial for how in value.placements):
        value = added_up(value)
    return torchs_way(op, (value, *rest), kwargs)


def _any(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch takes the truths of ranks for parts of a sum, which casts and sums then count."""
    return added_up(torchs_way(op, args, kwargs))


def _selected(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As for `_scan`: torch takes the gradient for one in rows of the selected values."""
    grad, sizes, dim, *rest = args
    return torchs_way(op, (grad, sizes, dim % len(sizes), *rest), kwargs)
