"""Attention: ranks exchange positions for heads, and attend over whole sequences (Ulysses)."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from zerofx.sequence.cuts import Cut
from zerofx.sequence.graph import Editor, Result
from zerofx.torch_private import exchanged

_SIGNATURE = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_HEADS, _POSITIONS = -3, -2


def attend(at: Editor, node: fx.Node) -> Result | None:
    """Each rank attends with its heads; queries are cut along their positions.

    Raises:
        UnsupportedError: the ranks do not divide the heads.
    """
    given: dict[str, Any] = {**dict(zip(_SIGNATURE, node.args, strict=False)), **node.kwargs}
    query, key, value = (given[name] for name in _SIGNATURE[:3])
    ndim = len(at.shape(query))
    alike = len(at.shape(key)) == len(at.shape(value)) == ndim
    if ndim < 3 or not alike or at.cut(query) != Cut(ndim + _POSITIONS):
        return None
    size, heads = at.place.size, at.shape(query)[_HEADS]
    if heads % size and ndim == 3:
        return None  # rows of a batch, of which one may have any number
    if heads % size:
        raise at.refusal(
            node,
            f"has {heads} heads, which {size} ranks cannot share",
            "let sequence_parallel divide the number of heads",
        )
    shared = heads // at.shape(key)[_HEADS] if given.get("enable_gqa") else 1
    times = next(
        n for n in range(1, shared + 1) if not shared % n and not heads // shared * n % size
    )
    given["query"] = _own_heads(at, query, 1)
    given["key"] = _own_heads(at, key, times)
    given["value"] = _own_heads(at, value, times)
    if (mask := given.get("attn_mask")) is not None:
        given["attn_mask"] = _mask(at, at.gathered(mask))
    if shared > 1:
        given["enable_gqa"] = shared > times
    node.args, node.kwargs = (), given
    return at.after(
        node,
        exchanged,
        lambda mixed: (mixed, ndim + _POSITIONS, ndim + _HEADS, at.place.group, size),
    ), Cut(ndim + _POSITIONS)


def _own_heads(at: Editor, value: fx.Node, times: int) -> fx.Node:
    """All positions of this rank's heads; each is repeated first, or one serves all."""
    if at.shape(value)[_HEADS] == times == 1:
        return at.gathered(value)
    ndim, place = len(at.shape(value)), at.place
    cut = at.cut(value)
    if cut != Cut(ndim + _POSITIONS):
        value, cut = at.gathered(value), None
    if times > 1:
        value = at.before(torch.repeat_interleave, (value, times, ndim + _HEADS))
    if cut is None:
        return _slice_heads(at, value)
    args = (value, ndim + _HEADS, ndim + _POSITIONS, place.group, place.size)
    return at.before(exchanged, args)


def _slice_heads(at: Editor, value: fx.Node) -> fx.Node:
    dim = at.value(value).ndim + _HEADS
    count = at.value(value).shape[dim] // at.place.size
    return at.before(torch.narrow, (value, dim, at.place.rank * count, count))


def _mask(at: Editor, mask: fx.Node) -> fx.Node:
    shape = at.shape(mask)
    return mask if len(shape) < 3 or shape[_HEADS] == 1 else _slice_heads(at, mask)
