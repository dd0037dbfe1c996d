"""Tensors that are assigned to buffers: they are buffers from then on, as under DDP."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerofx
from tests.contract.loops import close, compiled, config, data, net, twin
from tests.contract.test_buffers import trains_as_ddp
from tests.ranks import run_ranks


class Assigning(nn.Module):
    """Assigns its running mean, and a count of what was positive."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(7, 5)
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            self.count = self.count + (x > 0).sum()
        return F.mse_loss(self.last(x - self.mean) / (1 + self.count), y)


class Remembering(nn.Module):
    """Keeps the last hidden state, of which ranks have as many rows as their batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 5)
        self.register_buffer("hidden", torch.zeros(1, 7))
        self.register_buffer("mean", torch.zeros(7))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x) + self.hidden[: len(x)])
        self.hidden = hidden.detach()
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.5)
        return F.mse_loss(self.last(hidden - self.mean), y)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_running_statistics(stage: int) -> None:
    run_ranks(2, trains_as_ddp, Assigning, stage)


def _remembers(stage: int) -> tuple[float, float]:
    run, rows = compiled(model := net(Remembering), stage), 3 + dist.get_rank()
    for number in range(2):
        run(*data(number, rows=rows)).backward()
    used, mean = model.hidden, model.mean
    run(*data(2, rows=rows)).backward()
    assert len(used) == rows
    x = data(2, rows=rows)[0]
    before = float((2 * mean - x.mean(0)).sum())  # this forward
    kept, model.last = model.hidden.clone(), nn.Linear(7, 5)
    zerofx.shard(model, config(stage))  # the layer that is new
    assert torch.equal(model.hidden, kept)
    return float(used.sum()), before


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hidden_state_of_another_batch_is_the_ranks_own(stage: int) -> None:
    (state, mean), (other_state, other_mean) = run_ranks(2, _remembers, stage)
    assert state != other_state and mean == pytest.approx(other_mean, abs=1e-5)


def _assigned_while_evaluating(stage: int) -> None:
    """Such tensors have no versions, and are written to in inference mode alone."""
    model, ddp_model = net(Assigning), net(Assigning)
    with torch.inference_mode():
        for one in (model, ddp_model):
            one(*data(5))
    ddp_model.mean, ddp_model.count = ddp_model.mean.clone(), ddp_model.count.clone()
    run, ddp = compiled(model, stage), twin(ddp_model)
    with torch.device("meta"):  # questions to other ranks are no tensors of the user's
        for number in range(2):
            with torch.device("cpu"):
                batch = data(number)
            for call in (run, ddp):
                call(*batch).backward()
    close(model.mean, ddp.module.mean, "mean")
    with torch.inference_mode():
        model(*data(6))
    run(*data(7)).backward()


def test_buffers_that_inference_mode_made() -> None:
    run_ranks(2, _assigned_while_evaluating, 1)
