"""Functions of a sequence, each with what becomes of it where ranks share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH, WIDTH = 2, 8, 4
Function = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of hidden states `[rows, length, width]`, a square weight, and whole values `[rows, length]`."""

CUT: dict[str, Function] = {
    "gelu": lambda h, w, t: F.gelu(h),
    "add whole": lambda h, w, t: h + t[..., None] * w[0],
    "add to whole": lambda h, w, t: t[..., None].expand(-1, -1, WIDTH) - h,
    "broadcast rows": lambda h, w, t: h * t[:1, :, None],
    "where": lambda h, w, t: torch.where(t[..., None] > 0, h, w[0]),
    "masked_fill": lambda h, w, t: h.masked_fill(t[..., None] > 0, 2.0),
    "in place": lambda h, w, t: (h * 2).add_(t[..., None]).relu_(),
    "in place on a view": lambda h, w, t: _on_a_view(h),
    "linear": lambda h, w, t: F.linear(h, w, w[0]),
    "matmul": lambda h, w, t: h @ w,
    "flat matmul": lambda h, w, t: torch.addmm(w[0], h.view(-1, WIDTH), w).view(ROWS, LENGTH, -1),
    "einsum": lambda h, w, t: torch.einsum("bsi,io->bso", h, w),
    "einsum of heads": lambda h, w, t: torch.einsum("bshd,bs->bhsd", h.view(2, 8, 2, 2), t),
    "bmm": lambda h, w, t: torch.bmm(h.transpose(0, 1), w.expand(LENGTH, WIDTH, WIDTH)),
    "layer_norm": lambda h, w, t: F.layer_norm(h, (WIDTH,), w[0]),
    "rms_norm": lambda h, w, t: F.rms_norm(h, (WIDTH,)),
    "softmax": lambda h, w, t: F.softmax(h, -1),
    "sum": lambda h, w, t: h.sum(-1),
    "mean kept": lambda h, w, t: h.pow(2).mean(-1, keepdim=True),
    "sum of rows": lambda h, w, t: h.sum(0),
    "amax of an axis": lambda h, w, t: torch.amax(h, dim=0) + torch.sum(h, axis=-1).mean(),  # type: ignore
    "topk": lambda h, w, t: h.topk(2)[0],
    "max": lambda h, w, t: h.max(-1)[0] + torch.max(h, t[..., None]).sum(-1),
    "cumsum of width": lambda h, w, t: h.cumsum(-1),
    "one_hot": lambda h, w, t: F.one_hot((h[..., 0] > 0).long(), 3) * h[..., :1],
    "cat": lambda h, w, t: torch.cat((h, t[..., None]), -1),
    "stack": lambda h, w, t: torch.stack((h, h.cos()), 1),
    "split": lambda h, w, t: torch.mul(*h.split(2, -1)),
    "unbind": lambda h, w, t: h.view(2, 8, 2, 2).unbind(2)[1],
    "rotate": lambda h, w, t: torch.cat((-h[..., 2:], h[..., :2]), -1),
    "addmm of a part": lambda h, w, t: torch.addmm(h[0], h[1], w),
    "baddbmm": lambda h, w, t: torch.baddbmm(t[..., None], h, w.expand(ROWS, 4, 4)),
    "permute": lambda h, w, t: h.permute(2, 0, 1).contiguous(),
    "T": lambda h, w, t: h[0].T.mT,
    "flatten": lambda h, w, t: h.flatten(0, 1) * t.reshape(-1, 1),
    "flatten after": lambda h, w, t: h.flatten(1).cos(),
    "unflatten": lambda h, w, t: h.flatten(0, 1).unflatten(0, (ROWS, -1)),
    "windows": lambda h, w, t: h.view(ROWS, 4, 2, WIDTH).softmax(2),
    "expand": lambda h, w, t: h[:, None].expand(ROWS, 3, LENGTH, WIDTH).reshape(6, 8, 4),
    "repeat": lambda h, w, t: h.repeat(3, 1, 2),
    "repeat_interleave": lambda h, w, t: h.repeat_interleave(2, dim=-1),
    "whole slices": lambda h, w, t: h[:, :LENGTH][:, -LENGTH:, ::2],
    "embedding": lambda h, w, t: F.embedding((h[..., 0] > 0).long(), w),
    "lookup": lambda h, w, t: w[(h[..., 0] > 0).long()],
    "complex": lambda h, w, t: torch.view_as_real(torch.view_as_complex(h.view(2, 8, 2, 2)) * 2j),
    "scatter": lambda h, w, t: torch.zeros_like(h).scatter_(-1, h.topk(2)[1], 1.0) * h,
    "sorted by width": lambda h, w, t: h.gather(-1, h.argsort(-1)),
    "autocast": lambda h, w, t: _in_bf16(h.float(), w.float()).double(),
    "factories": lambda h, w, t: h + h.new_ones(ROWS, LENGTH, 1) + torch.zeros_like(h),
    "numbers": lambda h, w, t: h / h.shape[1] + h.size(-1) + h.numel(),
    "sum of all": lambda h, w, t: h.sum(),
    "sum of every dimension": lambda h, w, t: h.sum(()) * h.mean(dim=[]),
    "dropped in place": lambda h, w, t: _dropped(h),
    "paths kept": lambda h, w, t: h * h.new_empty(ROWS, 1, 1).bernoulli_(1.0),
    "drawn in place": lambda h, w, t: h * (1 + 0 * h.detach().clone().exponential_()),
    "of another's dtype": lambda h, w, t: h.to(t[0, :5]) * t[:, :3].type_as(h).sum(),
    "of a part's dtype": lambda h, w, t: h * t[:, None].to(h).sum() + w[:3].type_as(h)[0],
    "mean of positions": lambda h, w, t: h.mean(1),
    "mean of all": lambda h, w, t: h.mean(),
    "masked mean": lambda h, w, t: (h * t[..., None]).sum(1) / t.sum(1, keepdim=True),
    "causal attention": lambda h, w, t: F.scaled_dot_product_attention(
        *[_heads(h)] * 3, is_causal=True
    ),
    "attention of groups": lambda h, w, t: F.scaled_dot_product_attention(
        _heads(h), *[_heads(h[..., 2:])] * 2, enable_gqa=True
    ),
    "biased attention": lambda h, w, t: F.scaled_dot_product_attention(
        *[_heads(h)] * 3, attn_mask=t[:, None, None] * w[0, :2, None, None]
    ),
    "attention to whole": lambda h, w, t: F.scaled_dot_product_attention(
        _heads(h), *[_heads(t[..., None] * w[0])] * 2
    ),
    "attention without heads": lambda h, w, t: F.scaled_dot_product_attention(h, h * 2, h),
    "cat of nothing": lambda h, w, t: torch.cat((h.new_empty(0), h, h), -1),
    "no losses": lambda h, w, t: _cross_entropy(h, t, reduction="none"),
    "sum of losses": lambda h, w, t: _cross_entropy(h, t, reduction="sum"),
    "weighted": lambda h, w, t: _cross_entropy(h, t, weight=w[0].exp().detach()),
    "smoothed": lambda h, w, t: _cross_entropy(h, t, label_smoothing=0.2),
    "weighted and smoothed": lambda h, w, t: _cross_entropy(
        h, t, weight=w[0].exp().detach(), label_smoothing=0.2
    ),
    "chances": lambda h, w, t: F.cross_entropy(h.mT, F.softmax(t[:, None] * w[:, :1], 1)),
    "nll": lambda h, w, t: F.nll_loss(h.log_softmax(-1).flatten(0, 1), _labels(t).flatten()),
}
"""Ranks have parts of the result, or sums of parts."""

WHOLE: dict[str, Function] = {
    "last position": lambda h, w, t: h[:, -1],
    "shift": lambda h, w, t: h[:, :-1] - h[:, 1:],
    "cumsum": lambda h, w, t: h.cumsum(1),
    "flip": lambda h, w, t: h.flip(1, 2),
    "amax": lambda h, w, t: h.amax(1),
    "var": lambda h, w, t: h.var(False),
    "sort": lambda h, w, t: h.sort(1)[0],
    "softmax of positions": lambda h, w, t: h.softmax(1) * h,
    "conv": lambda h, w, t: F.conv1d(h.transpose(1, 2), w[..., None].expand(-1, -1, 3), padding=1),
    "pad": lambda h, w, t: F.pad(h, (0, 0, 1, 0))[:, :-1],
    "roll": lambda h, w, t: h.roll(1, 1) + h,
    "scores": lambda h, w, t: (h @ h.mT).softmax(-1) @ h,
    "pairs": lambda h, w, t: h[:, :, None] * h[:, None],
    "vector times matrix": lambda h, w, t: w[0] @ h[0].T,
    "gram": lambda h, w, t: h.mT @ h,
    "folded": lambda h, w, t: h.reshape(ROWS * LENGTH // 4, 4, WIDTH)[1:],
    "transposed first": lambda h, w, t: h.transpose(0, 1).reshape(-1, WIDTH).cumsum(0),
    "triu": lambda h, w, t: h.triu(),
    "norm": lambda h, w, t: F.normalize(h, dim=1) + F.instance_norm(h, eps=1e-3),
    "diagonal": lambda h, w, t: (h @ w).view(ROWS, LENGTH, WIDTH).diagonal(dim1=1, dim2=2),
    "nonzero": lambda h, w, t: h.gather(1, (t[..., None] > 0).long().expand_as(h)),
    "attention to one head": lambda h, w, t: F.scaled_dot_product_attention(
        _heads(h), *[_heads(h[..., :2])] * 2
    ),
    "attention by a mask of parts": lambda h, w, t: F.scaled_dot_product_attention(
        *[_heads(h)] * 3, attn_mask=h[:, None, None, :, 0]
    ),
    "attention of whole": lambda h, w, t: F.scaled_dot_product_attention(
        _heads(t[..., None] * w[0]), *[_heads(h)] * 2
    ),
    "attention of three rows": lambda h, w, t: F.scaled_dot_product_attention(
        *[torch.cat((h, h[:1]))] * 3
    ),
    "attention with its projections": lambda h, w, t: F.multi_head_attention_forward(
        *[h] * 3, WIDTH, 2, w.repeat(3, 1), None, None, None, False, 0.0, w, None
    )[0],
    "named length": lambda h, w, t: h.narrow(1, 0, LENGTH) * h.split([LENGTH], 1)[0],
    "summed to its size": lambda h, w, t: h.sum_to_size(ROWS, LENGTH, WIDTH).cos(),
    "unfolded": lambda h, w, t: h.unfold(1, LENGTH, 1).cos(),
    "counted words": lambda h, w, t: F.embedding(
        (h[..., 0] > 0).long(), w, scale_grad_by_freq=True
    ),
    "written to whole": lambda h, w, t: _filled(h),
    "gathered twice": lambda h, w, t: _written_between(h),
    "greatest of every dimension": lambda h, w, t: h.amax(dim=()),
    "a function of ours": lambda h, w, t: _Bounded.apply(h),
    "a branch of a position": lambda h, w, t: _either(h[:, -1], t) * h.sum(1),
    "picked before": lambda h, w, t: _picked(h, lambda x: x[:, 0] + 1),
    "picked and written to": lambda h, w, t: h.clone()[:, -1].mul_(3),
}
"""Ranks are given the whole."""

REFUSED: dict[str, Function] = {
    "of a position": lambda h, w, t: _after(h, lambda x: x[:, -1].mul_(3)),
    "of the first ones": lambda h, w, t: _after(h, lambda x: x[:, :1].zero_()),
    "of half of them": lambda h, w, t: _after(h, lambda x: x[:, 4:].mul_(0)),
    "of a selection": lambda h, w, t: _after(h, lambda x: x.select(1, 0).copy_(w[0])),
    "of a narrow view": lambda h, w, t: _after(h, lambda x: x.narrow(1, 0, 1).fill_(0.0)),
    "of a view of a view": lambda h, w, t: _after(h, lambda x: x[:, -1][0].add_(1)),
    "of windows": lambda h, w, t: _after(h, lambda x: x.view(2, 4, 2, 4)[:, 0].zero_()),
    "of sums up to each": lambda h, w, t: _after(h, lambda x: x.cumsum_(1)),
    "of a triangle": lambda h, w, t: _after(h, lambda x: x.tril_()),
    "of norms": lambda h, w, t: _after(h, lambda x: x.renorm_(2, 0, 0.5)),
    "of a diagonal": lambda h, w, t: h[0].clone().fill_diagonal_(0.0),
    "of channels dropped": lambda h, w, t: _after(h, lambda x: F.dropout1d(x, inplace=True)),
    "under a view, by a checkpoint": lambda h, w, t: _picked(
        h, lambda x: x[:, 0], lambda x: checkpoint(lambda y: y.mul_(2), x, use_reentrant=False)
    ),
    "under a view": lambda h, w, t: _picked(h, lambda x: x[:, 0]),
    "of what parts need not copy": lambda h, w, t: _folded(h),
}
"""Writes in place that parts would lose, or that would reach too far."""


class _Bounded(torch.autograd.Function):
    """Its backward looks at all positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore
        return grad / (1 + grad.abs().amax())


def _either(h: Tensor, t: Tensor) -> Tensor:
    return torch.cond(t.sum() > 0, lambda x: x.cos(), lambda x: x.sin(), (h,))


def _heads(h: Tensor) -> Tensor:
    return h.reshape(ROWS, LENGTH, -1, 2).transpose(1, 2)


def _dropped(h: Tensor) -> Tensor:
    """All of it, with near certainty; `F.dropout` draws nothing if it is certain."""
    h = h.mean(1)
    F.dropout(h, 1 - 1e-9, training=True, inplace=True)
    return h


def _after(h: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    h = h.clone()
    write(h)
    return h


def _picked(
    h: Tensor,
    pick: Callable[[Tensor], Tensor],
    write: Callable[[Tensor], Any] = lambda x: x.mul_(2),
) -> Tensor:
    h = h.clone()
    picked = pick(h)
    write(h)
    return h.sum(0)[0] * picked


def _folded(h: Tensor) -> Tensor:
    h = h.clone()
    folded = h.view(ROWS, 2, LENGTH // 2, WIDTH).transpose(1, 2).contiguous()
    folded.mul_(2)
    return h.sum() * folded


def _on_a_view(h: Tensor) -> Tensor:
    h = h.clone()
    h.view(ROWS, -1).mul_(3)
    return h


def _filled(h: Tensor) -> Tensor:
    out = h.new_zeros(ROWS, LENGTH, 2 * WIDTH)
    out[..., WIDTH:] = h
    return out


def _in_bf16(h: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(h, w.detach())
        return out.where(out > 0, out.float())


def _written_between(h: Tensor) -> Tensor:
    h = h.clone()
    before = h.cumsum(1)
    h += 1
    return before * h.cumsum(1)


def _labels(t: Tensor) -> Tensor:
    labels = (t * 3).long().abs() % WIDTH
    return labels.masked_fill(t > 0.9, -100)


def _cross_entropy(h: Tensor, t: Tensor, **how: Any) -> Tensor:
    return F.cross_entropy(h.reshape(-1, WIDTH), _labels(t).reshape(-1), **how)
