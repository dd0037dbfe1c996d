"""Views of sharded tensors are views: found in any way, kept, and written to after other edits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zerofx
from tests.contract.loops import close, compiled, config, data, full, net, refused, same, sgd, twin
from tests.ranks import run_ranks

# Each finds rows of a matrix of 13 times 7 in another way, and writes to them.
WRITES: dict[str, Callable[[Any], Any]] = {
    "scalar tensor": lambda w: w[torch.tensor(3)].fill_(1),
    "scalar tensor and slice": lambda w: w[torch.tensor(-1), 2:4].fill_(2),
    "rows that a mask names": lambda w: [
        w[i].fill_(3) for i in torch.where(torch.arange(13) % 5 == 1)[0]
    ],
    "number of numpy": lambda w: w[np.int64(9)].mul_(4),
    "ellipsis": lambda w: w[2:4][...].fill_(5),
    "ravel": lambda w: w.ravel()[7:15].fill_(6),
    "split_with_sizes": lambda w: w.split_with_sizes([3, 10])[1].mul_(0.5),
    "as_strided": lambda w: w.as_strided((3, 7), (7, 1), 14).add_(7),
    "select": lambda w: torch.select(w, 0, 8).fill_(8),
    "narrow": lambda w: torch.narrow(w, 0, 5, 4).mul_(2),
    "chunk": lambda w: torch.chunk(w, 3)[1].add_(9),
    "unbind": lambda w: torch.unbind(w)[12].fill_(10),
    "flatten": lambda w: torch.flatten(w)[40:60].fill_(11),
    "reshape": lambda w: torch.reshape(w, (-1,))[-3:].fill_(12),
    "diagonal": lambda w: torch.diagonal(w).fill_(13),
    "tensor_split": lambda w: torch.tensor_split(w, 3)[2].neg_(),
    "ravelled": lambda w: torch.ravel(w)[30:33].fill_(14),
    "functions": lambda w: torch.neg_(w[6]),
    "out": lambda w: torch.add(torch.ones(7), 14, out=w[10]),
    "list of a row": lambda w: torch._foreach_mul_([w[2]], 2.0),
    "list of rows": lambda w: torch._foreach_zero_([w[1], w[4]]),
    "list of overlapping rows": lambda w: torch._foreach_add_([w[0:3], w[2:5]], 1.0),
    "list of all rows": lambda w: torch._foreach_add_(list(w.unbind()), 1.0),
}


def _found(stage: int) -> None:
    """Also of `data` and of gradients, and in a model in use."""
    model, plain = net(), net()
    run = compiled(model, stage)
    run(*data(0))
    for name, write in WRITES.items():
        for trained in (model, plain):
            weight: Any = trained.first.weight
            weight.grad = torch.ones_like(weight)
            for value in (weight.data, weight.grad):
                write(value)
            with torch.no_grad():
                write(weight)
        for value, wanted in (
            (model.first.weight, plain.first.weight),
            (model.first.weight.grad, plain.first.weight.grad),
        ):
            assert torch.equal(full(value), full(wanted)), name
    with torch.no_grad():
        close(run(*data(0)), plain(*data(0)), "forward")


@pytest.mark.parametrize("stage", [1, 3])
def test_rows_that_are_found_in_any_way(stage: int) -> None:
    run_ranks(2, _found, stage)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda w: w.data[:5],
    "narrow": lambda w: w.data.narrow(0, 2, 6),
    "row": lambda w: w.detach()[2],
    "columns": lambda w: w.data.t()[1:3],
    "view": lambda w: w.data.view(-1),
}


def _kept(stage: int) -> None:
    """A projection through a view that was taken once."""
    for name, view in VIEWS.items():
        model, ddp = net(), twin(net())
        run = compiled(model, stage)
        run(*data(0))
        steps = [
            (one, trained, sgd(trained), view(trained.first.weight))
            for one, trained in ((run, model), (ddp, ddp.module))
        ]
        for number in range(2):
            read: list[Tensor] = []
            for one, _, optimizer, rows in steps:
                one(*data(number)).backward()
                optimizer.step()
                optimizer.zero_grad()
                read.append(full(rows))
                rows.clamp_(min=0)
            close(read[0], read[1], f"read through {name}")
            same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_view_that_is_kept_over_steps(stage: int) -> None:
    run_ranks(2, _kept, stage)


def _two_of_a_row(w: Any) -> None:
    one, other = w.data[0], w.data[0]
    one[0] = 1
    other[1] = 2


def _overlapping(w: Any) -> None:
    rows = [w.data[i : i + 2] for i in range(len(w) - 1)]
    for each in rows:
        each.add_(1)


def _edited_between(w: Any) -> None:
    row = w.data[1]
    w.data.mul_(2)
    row[0] = 5
    torch._foreach_mul_([w.data], 3.0)
    row.add_(1)


def _set_after_lists(w: Any) -> None:
    """Lists count no writes that a view could see."""
    row, other = w.data[1], w.data[2]
    torch._foreach_mul_([w.data], 3.0)
    row[0] = 5
    other.index_fill_(0, torch.tensor([3]), 0.0)


def _of_a_view(w: Any) -> None:
    rows = w.data[:6]
    row = rows[2]
    w.data[2].zero_()
    rows.add_(1)
    row[1] = 7
    rows[2].data.mul_(3)


def _swapped(w: Any) -> None:
    rows = w.data.unbind()
    first = rows[0].clone()
    rows[0].copy_(rows[1])
    rows[1].copy_(first)
    rows[2].mul_(rows[0])


def _by_iteration(w: Any) -> None:
    for row in w.data:
        row.div_(1 + row.norm())
        row.mul_(2)


def _taken_with_gradients(w: Any) -> None:
    row, rows = w[3], list(w.unbind())
    w[5].data.zero_()
    with torch.no_grad():
        row.zero_()
        torch._foreach_mul_(rows[-2:], 2.0)


def _transposed(w: Any) -> None:
    rows = w.data[4:9].t_()
    rows[1].add_(1)


EDITS = (
    *(_two_of_a_row, _overlapping, _edited_between, _set_after_lists, _of_a_view, _swapped),
    *(_by_iteration, _taken_with_gradients, _transposed),
)


def _edited(stage: int) -> None:
    for edit in EDITS:
        model, plain = net(), net()
        zerofx.shard(model, config(stage))
        for trained in (model, plain):
            edit(trained.first.weight)
        close(full(model.first.weight), full(plain.first.weight), edit.__name__)


@pytest.mark.parametrize("stage", [1, 3])
def test_several_views_of_the_same_rows(stage: int) -> None:
    run_ranks(2, _edited, stage)


def _scaled(w: Any) -> Tensor:
    row = w[3]
    row.mul_(3).add_(w[4])
    row[1] = 5
    w.view(-1)[40:50].mul_(2)
    torch.narrow(w, 0, 9, 3).sin_()
    w[11] *= 2
    return row.square().sum() + w.square().sum()


def _with_gradients() -> None:
    model, plain = net(), net()
    zerofx.shard(model, config(3))
    losses = [_scaled(trained.first.weight * 2) for trained in (model, plain)]
    close(full(losses[0]), full(losses[1]), "loss")
    for loss in losses:
        loss.backward()
    close(full(model.first.weight.grad), full(plain.first.weight.grad), "gradient")
    doubled = model.first.weight * 2
    with refused("value[0] = -value[0]"):
        torch.neg_(doubled[0])


def test_rows_that_gradients_go_through() -> None:
    run_ranks(2, _with_gradients)
