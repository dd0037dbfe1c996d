"""Losses of positions that ranks share: each rank has the loss of the whole sequence."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from zerofx.sequence.equations import by_equation
from zerofx.sequence.graph import Editor, Result
from zerofx.sequence.operations import name_of
from zerofx.torch_private import total


def divide_loss(at: Editor, node: fx.Node) -> Result | None:
    """Each rank adds up the losses of its positions; sums and counts are those of all ranks."""
    function = getattr(F, name_of(node))
    signature = inspect.signature(function)
    given = signature.bind(*node.args, **node.kwargs).arguments
    logits, target = given["input"], given["target"]
    old = given.get("size_average"), given.get("reduce")
    if old != (None, None) or len(at.shape(logits)) < 2:
        return None
    rest = "defgh"[: len(at.shape(logits)) - 2]
    chances = at.whole(target).is_floating_point()
    done = by_equation(at, node, f"nc{rest},n{'c' if chances else ''}{rest},c->n{rest}")
    if done is None or given.get("reduction") == "none":
        return done
    bound = signature.bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    found = bound.arguments
    args = (
        found["input"],
        found["target"],
        found["weight"],
        found["ignore_index"],
        found["reduction"],
        found.get("label_smoothing"),
        at.place.group,
    )
    return at.replace(node, whole_loss, args), None


def whole_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float | None,
    group: str,
) -> Tensor:
    """Cross entropy of all ranks' positions together; `nll_loss` without `label_smoothing`."""
    how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": "none"}
    if label_smoothing is None:
        losses = F.nll_loss(logits, target, weight, **how)
    else:
        losses = F.cross_entropy(logits, target, weight, label_smoothing=label_smoothing, **how)
    # Sums of many positions need more than 16 bits.
    wide = torch.promote_types(losses.dtype, torch.float32)
    summed = total(losses.sum(dtype=wide), group)
    if reduction == "mean":
        summed = summed / total(_count(losses, target, weight, ignore_index, wide), group)
    return summed.to(losses.dtype)


def _count(
    losses: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """What a mean is divided by: positions, or their labels' weights."""
    if target.is_floating_point():
        return torch.ones_like(losses).detach().sum(dtype=dtype)
    valid = target != ignore_index
    if weight is None:
        return valid.sum().to(dtype)
    return weight[torch.where(valid, target, 0)].where(valid, 0).detach().sum(dtype=dtype)
