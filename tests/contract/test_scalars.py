"""Numbers read from parameters and gradients are those of the whole model, on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.contract.loops import compiled, config, data, full, net, same, sgd, twin
from tests.logs import heard
from tests.ranks import run_ranks

READINGS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda value: value.sum().item(),
    "norm": lambda value: float(value.norm()),
    "mean": lambda value: value.mean().item(),
    "most": lambda value: value.max().item(),
    "zeros": lambda value: int(value.count_nonzero()),
    "any": lambda value: bool((value > 0.3).any()),
    "row": lambda value: value[-1].sum().item(),
}


def _read(stage: int) -> None:
    model, ddp = net(), twin(net())
    for run in (compiled(model, stage), ddp):
        run(*data(0)).backward()
    pairs = list(zip(model.parameters(), ddp.parameters(), strict=True))
    for name, read in READINGS.items():
        for mine, plain in pairs:
            assert read(mine) == pytest.approx(read(plain), rel=1e-5), name
            assert read(mine.grad) == pytest.approx(read(plain.grad), rel=1e-5), name
    total = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    wanted = nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_numbers_are_global(stage: int) -> None:
    run_ranks(2, _read, stage)


def _clip(model: nn.Module, most: float) -> None:
    """By hand, as many a loop does."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    norm = sum(grad.norm(2).item() ** 2 for grad in grads) ** 0.5
    for grad in grads:
        grad.mul_(min(1.0, most / norm))


def _by_hand(stage: int) -> None:
    model, ddp = net(), twin(net())
    for trained, run in ((model, compiled(model, stage)), (ddp.module, ddp)):
        optimizer = sgd(trained)
        for number in range(3):
            x, y = data(number)
            if number == 1:
                y[:, -1] = torch.inf  # the last bias overflows, which one rank owns
            run(x, y).backward()
            _clip(trained, 0.1)
            if bool(torch.isfinite(trained.last.bias.grad).all()):
                optimizer.step()
            optimizer.zero_grad()
    assert torch.isfinite(full(model.last.bias)).all()
    same(model, ddp)


@pytest.mark.parametrize("stage", [1, 3])
def test_clipping_and_skipping_by_hand(stage: int) -> None:
    run_ranks(2, _by_hand, stage)


def _alone(how: str) -> list[str]:
    """Rank 0 reads a norm, or rows of all ranks, to print them; the other one comes late."""
    model = net()
    zerofx.shard(model, config(3, hang_timeout=0.4))
    with heard("zerofx.runtime.watch") as said:
        if dist.get_rank() == 1:
            time.sleep(1.5)
        if how == "norm":
            assert float(model.first.weight.norm()) > 0
        else:
            assert model.first.weight.detach().view(-1).shape == (91,)
    return said


@pytest.mark.parametrize("how", ["norm", "rows"])
def test_a_number_that_one_rank_reads(how: str) -> None:
    first, other = run_ranks(2, _alone, how)
    assert len(first) == 1 and not other
    assert "test_scalars.py:" in first[0] and "Remedy: value = value.full_tensor()" in first[0]


EXTREMES: dict[str, Callable[[Tensor], Any]] = {
    "most": lambda value: value.max().item(),
    "least": lambda value: value.amin().item(),
    "largest": lambda value: value.norm(torch.inf).item(),
    "smallest": lambda value: torch.linalg.vector_norm(value, -torch.inf).item(),
    "by row": lambda value: full(value.amax(1)),
    "by column": lambda value: full(value.amax(0)),
    "of a list": lambda value: torch._foreach_max([value.detach()])[0].item(),
    "of columns": lambda value: full(torch.linalg.vector_norm(value, torch.inf, 0)),
}


def _one_row(stage: int) -> None:
    """The last rank has nothing of a head for one number."""
    ranks = []
    for build in (lambda model: compiled(model, stage), lambda model: model):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        run = build(model)
        run(torch.ones(2, 4)).sum().backward()
        weight: Any = model[2].weight
        read = [[look(each) for look in EXTREMES.values()] for each in (weight, weight.grad)]
        norms = [
            full(nn.utils.clip_grad_norm_(model.parameters(), 0.01, torch.inf, foreach=foreach))
            for foreach in (True, False)
        ]
        ranks.append([*read, norms])
    torch.testing.assert_close(*ranks)


@pytest.mark.parametrize("stage", [1, 3])
def test_extremes_of_what_some_ranks_have_nothing_of(stage: int) -> None:
    run_ranks(2, _one_row, stage)


ARRAYS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda value: value.numpy(),
    "of a copy": lambda value: value.cpu().numpy(),
    "forced": lambda value: value.numpy(force=True),
    "asarray": np.asarray,
    "of norms": lambda value: torch.stack([value.norm(), value.sum()]).numpy(),
    "tolist": lambda value: np.array(value.tolist()),
}


def _arrays(stage: int) -> None:
    model, ddp = net(), twin(net())
    for run in (compiled(model, stage), ddp):
        run(*data(0)).backward()
    pairs: list[tuple[Any, Any]] = list(zip(model.parameters(), ddp.parameters(), strict=True))
    for mine, plain in pairs:
        for name, read in ARRAYS.items():
            for one, other in ((mine.detach(), plain.detach()), (mine.grad, plain.grad)):
                np.testing.assert_allclose(read(one), read(other), 1e-5, err_msg=name)
        with pytest.raises(ValueError, match="read-only"):
            mine.detach().numpy()[...] = 0
        with pytest.raises(RuntimeError, match="requires grad"):
            mine.numpy()


@pytest.mark.parametrize("stage", [1, 3])
def test_arrays_are_of_the_whole(stage: int) -> None:
    run_ranks(2, _arrays, stage)
