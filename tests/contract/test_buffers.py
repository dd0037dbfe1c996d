"""Buffers that ranks change unlike each other, as under DDP: rank 0's before a forward, once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract.loops import FAST, close, compiled, data, full, net, refused, sgd, twin
from tests.hard.wire import watched
from tests.ranks import close_pools, run_ranks
from zerofx.errors import DivergedError
from zerofx.runtime.members import gloo_group


class Restarting(nn.Module):
    """Doubles a scale if the rank's batch asks for it, as codebooks restart dead codes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 5)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.training and x.sum() > 0:
            with torch.no_grad():
                self.scale.mul_(2)
        return F.mse_loss(self.last(hidden * self.scale.mean().log2()), y)


class Cumulative(nn.Module):
    """Averages over all batches: its counter is raised in a graph of its own, its mean after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 13), nn.Linear(13, 5)
        self.norm = nn.BatchNorm1d(13, momentum=None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.norm(self.first(x))), y)


class Counterless(Cumulative):
    """Has running statistics and no counter."""

    def __init__(self) -> None:
        super().__init__()
        del self.norm
        self.register_buffer("mean", torch.zeros(13))
        self.register_buffer("var", torch.ones(13))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.batch_norm(self.first(x), self.mean, self.var, training=self.training)
        return F.mse_loss(self.last(x), y)


class Redrawing(nn.Module):
    """Draws a projection anew behind a graph break, as Performers do, and normalises."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Linear(13, 5)
        self.register_buffer("projection", torch.eye(13))

    @torch.compiler.disable
    def redraw(self, x: Tensor) -> None:
        with torch.no_grad():
            torch.manual_seed(int(1000 * x.abs().sum()))
            self.projection.copy_(torch.randn(13, 13))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        if self.training:
            self.redraw(x)
        return F.mse_loss(self.last(torch.tanh(hidden @ self.projection)), y)


class Recurrent(nn.Module):
    """Runs a layer with a running state three times, with a graph break in it; writes first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("state", torch.zeros(7))

    def layer(self, x: Tensor) -> Tensor:
        out = self.first(x) + self.state
        self.state.copy_(out.detach().mean(0))
        torch._dynamo.graph_break()
        return torch.tanh(out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(x.mean(0))
        torch._dynamo.graph_break()
        x = x - self.mean
        for _ in range(3):
            x = self.layer(x)
        return F.mse_loss(self.last(x), y)


def trains_as_ddp(kind: type[nn.Module], stage: int, steps: int = 4) -> list[bool]:
    """Losses and buffers are those of the twin; says which batches had a positive sum."""
    model = net(kind)
    ddp = twin(model)
    run, ours, theirs = compiled(model, stage), sgd(model), sgd(ddp)
    signs: list[bool] = []
    for number in range(steps):
        x, y = data(number, rows=6)
        signs.append(bool(x.sum() > 0))
        losses = [run(x, y), ddp(x, y)]
        close(losses[0].detach(), losses[1].detach(), f"loss {number}", 1e-5)
        for loss, optimizer in zip(losses, (ours, theirs), strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        model.eval(), ddp.eval()
        close(run(*data(9)), ddp(*data(9)), "evaluation", 1e-5)
    for (name, got), want in zip(model.named_parameters(), ddp.parameters(), strict=True):
        close(full(got), want.detach(), name, 1e-5)
    for (name, got), want in zip(model.named_buffers(), ddp.module.buffers(), strict=True):
        close(got, want, name, 1e-5)
    return signs


# The fifth step, which only rank 0 takes, comes before an evaluation.
@pytest.mark.parametrize(("stage", "steps"), [(0, 5), (3, 4), (3, 5)])
def test_a_branch_that_one_rank_takes(stage: int, steps: int) -> None:
    first, other = run_ranks(2, trains_as_ddp, Restarting, stage, steps)
    assert any(one != another for one, another in zip(first, other, strict=True))
    assert (first[-1] != other[-1]) is (steps == 5)


def _groups_made(on_cpus: bool) -> int:
    with (
        patch("zerofx.runtime.buffers.serves", return_value=on_cpus),
        patch("zerofx.runtime.buffers.gloo_group", wraps=gloo_group) as made,
    ):
        trains_as_ddp(Restarting, 3)
    return made.call_count


def test_ranks_ask_each_other_over_gloo_where_nccl_is_alone() -> None:
    assert run_ranks(2, _groups_made, False) == [1] * 2
    assert run_ranks(2, _groups_made, True) == [0] * 2


@pytest.mark.parametrize(
    ("kind", "stage"), [(Cumulative, 0), (Counterless, 3), (Redrawing, 0), (Recurrent, 3)]
)
def test_values_that_ranks_write_inside_a_forward(kind: type[nn.Module], stage: int) -> None:
    run_ranks(2, trains_as_ddp, kind, stage)


def _several_forwards(stage: int) -> None:
    model = net(Restarting)
    ddp = twin(model)
    run = compiled(model, stage)
    for number in range(3):
        for call in (run, ddp):
            sum((call(*data(10 * number + part, rows=6)) for part in range(3)), torch.zeros(()))
    close(model.scale, ddp.module.scale, "scale")


@pytest.mark.parametrize("stage", [0, 3])
def test_several_forwards_before_a_backward(stage: int) -> None:
    run_ranks(2, _several_forwards, stage)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 5)
        self.register_buffer("mask", torch.ones(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(x * self.mask), y)


def _asks_once(stage: int) -> None:
    model = net(Masked)
    run = compiled(model, stage)
    run(*data(0)).backward()
    with watched() as wire:
        run(*data(1)).backward()
        assert wire.count("broadcast") == 0 and wire.numels("all_reduce").count(3) == 1
        with torch.no_grad():
            for _ in range(2):
                run(*data(2))
        assert wire.count("broadcast") == 0 and wire.numels("all_reduce").count(3) == 1
        model.mask.zero_()
        run(*data(3)).backward()
        assert wire.count("broadcast") == 1
    assert not model.mask.any()


@pytest.mark.parametrize("stage", [0, 3])
def test_constant_buffers_are_not_sent(stage: int) -> None:
    run_ranks(2, _asks_once, stage)


def _one_rank_writes_before_an_evaluation() -> None:
    model = net(Masked)
    run = compiled(model, 1, options={**FAST, "hang_timeout": 1})
    for number in range(2):
        run(*data(number)).backward()
    if dist.get_rank() == 0:
        model.mask.zero_()
    with refused("buffers", "one rank alone writes", kind=DivergedError):
        with torch.no_grad():
            run(*data(2))
        for number in range(3):
            run(*data(number)).backward()


def test_a_buffer_that_one_rank_writes_before_an_evaluation() -> None:
    """A rank may evaluate alone, so that none asks the others then."""
    run_ranks(2, _one_rank_writes_before_an_evaluation)
    close_pools()  # half a collective was begun
