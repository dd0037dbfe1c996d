"""In a loss outside the model: edits of what is computed from parameters, with their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.contract.loops import close, compiled, data, full, net, refused, twin
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError

Edit = Callable[[Any], Any]


def _set(index: Any, value: Any) -> Edit:
    return lambda w: w.__setitem__(index, value(w) if callable(value) else value)


def _times(index: Any, factor: Any) -> Edit:
    def edit(w: Any) -> None:
        w[index] *= factor

    return edit


def _in_rows(w: Any) -> None:
    row = w[3]
    row.mul_(3)
    w[3:5].add_(1.0)
    w.t()[:, 4].fill_(0.5)
    w[5][2:4] *= 2


EDITS: dict[str, Edit] = {
    "row": _set(2, 0.0),
    "constant row": _set(2, torch.ones(7, dtype=torch.float64)),
    "last row": _set(-1, lambda w: w[0] * 2),
    "column": _set((slice(None), 2), 0.0),
    "mask": lambda w: w.__setitem__(w > 0.3, 0.0),
    "rows, scaled": _times(slice(2, 9), 0.5),
    "block": _times((slice(2, 9), slice(1, 3)), 3.0),
    "in rows": _in_rows,
    "through a view": lambda w: w.view(-1)[17:60].mul_(2),
    "narrow": lambda w: w.narrow(0, 5, 4).add_(1.0),
    "lower": lambda w: w.tril_(),
    "sums": lambda w: w.cumsum_(0),
    "filled": lambda w: w.index_fill_(0, torch.tensor([1, 5]), 0.0),
    "added": lambda w: w.index_add_(0, torch.tensor([1, 5]), w.detach()[3:5].clone()),
    "scattered": lambda w: w.scatter_(0, torch.arange(7)[None], 0.5),
    "renormed": lambda w: w.renorm_(2, 0, 0.3),
    "copied": lambda w: w.copy_(w.exp()),
    "masked by a number": lambda w: w.mul_(torch.ones(13, 7, dtype=w.dtype).tril()),
    "0-d": lambda w: w.mul_(torch.tensor(2.0, dtype=w.dtype)),
}
"""Of twice the first weight, through which gradients go."""

FILLS: dict[str, Callable[[Any, Any], Any]] = {
    "row": lambda made, w: made.__setitem__(2, w[3] * 2),
    "row in place": lambda made, w: made[2].copy_(w[3]),
    "column": lambda made, w: made.__setitem__((slice(None), 2), w[:, 3].sin()),
    "rows": lambda made, w: made.index_copy_(0, torch.tensor([1, 4]), w[5:7] * 1),
    "mask": lambda made, w: made.__setitem__(w > 0, w[w > 0] * 2),
    "all": lambda made, w: made.copy_(w.exp()),
    "sum": lambda made, w: made.add_(w),
}
"""Of zeros like the first weight, through which gradients go from then on."""

PARTS: dict[str, Edit] = {
    "added": lambda norms: norms.add_(1.0),
    "row added": lambda norms: norms.add_(torch.ones(7, dtype=norms.dtype)),
    "root": lambda norms: norms.sqrt_(),
    "logarithm": lambda norms: norms.log_(),
    "power": lambda norms: norms.pow_(2),
    "masked": lambda norms: norms.masked_fill_(norms > 0.3, 0.0),
}
"""Of the squares of columns, which ranks have parts of."""


def _losses() -> dict[str, Callable[[Any], Tensor]]:
    def edited(edit: Edit, made: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
        def loss(module: Any) -> Tensor:
            value = made(module.first.weight)
            edit(value)
            return value.square().sum()

        return loss

    def filled(fill: Callable[[Any, Any], Any]) -> Callable[[Any], Tensor]:
        def loss(module: Any) -> Tensor:
            made = torch.zeros_like(module.first.weight)
            fill(made, module.first.weight)
            return (made * made).sum()

        return loss

    found = {f"edit: {name}": edited(edit, lambda w: w * 2) for name, edit in EDITS.items()}
    found |= {f"fill: {name}": filled(fill) for name, fill in FILLS.items()}
    squares = {name: edited(edit, lambda w: w.square().sum(0)) for name, edit in PARTS.items()}
    return found | {f"parts: {name}": loss for name, loss in squares.items()}


def _agree(stage: int) -> None:
    model, ddp = net().double(), twin(net().double())
    run = compiled(model, stage)
    for name, loss in _losses().items():
        for forward, module in ((run, model), (ddp, ddp.module)):
            module.zero_grad()
            total = forward(*data(0, dtype=torch.float64)) + loss(module)
            total.backward()
        for param, plain in zip(model.parameters(), ddp.parameters(), strict=True):
            close(full(param.grad), plain.grad, name, rtol=1e-12)


@pytest.mark.parametrize(("stage", "num_ranks"), [(3, 2), (1, 2), (3, 4)])
def test_edits_have_the_gradients_of_plain_tensors(stage: int, num_ranks: int) -> None:
    run_ranks(num_ranks, _agree, stage)


def _refused() -> None:
    model = net()
    run = compiled(model, 3)
    loss = run(*data(0))
    own = torch.full((7,), float(dist.get_rank()))
    nans = torch.full((2, 7), torch.nan)
    nans[1 - dist.get_rank()] = 1
    writes: dict[str, Callable[[Any], Any]] = {
        "__iadd__": lambda w: w.__iadd__(loss),
        "mul_": lambda w: w.mul_(loss * torch.ones(7)),
        "copy_": lambda w: w.copy_(loss * torch.ones(13, 7)),
        "index_add_": lambda w: w.index_add_(0, torch.tensor([1]), loss * torch.ones(1, 7)),
        "an assignment": lambda w: w.__setitem__(2, loss),
        "__imul__": lambda w: w.__imul__(own),
        "add_": lambda w: w.add_(own[1]),
        "sub_": lambda w: w.sub_(nans[0]),
        "div_": lambda w: w.div_(nans[1]),
    }
    for name, write in writes.items():
        value = model.first.weight * 2
        before = full(value.detach()).clone()
        with refused(name, "penalty = penalty + loss", kind=UnsupportedError):
            write(value)
        assert torch.equal(full(value.detach()), before)


def test_what_a_rank_alone_knows_is_not_written_to_what_all_share() -> None:
    """With gradients or without, as long as the written have some: it would be lost."""
    run_ranks(2, _refused)
