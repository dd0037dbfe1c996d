"""A run whose numbers hang on where it is: data, dropout, accumulation, loss scale, schedule."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import zerofx
from tests.faults.dying import OPTIONS, WIDTH, doom, end_at
from tests.hard.pair import full
from zerofx import checkpoint

STEPS, BATCHES_PER_EPOCH = 7, 5  # two micro-batches a step: epochs end inside of steps


def train(folder: str, doomed: int | None = None) -> tuple[list[float], list[Tensor]]:
    """Go on from the last checkpoint to the end; rank `doomed` ends within the fifth step."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 9), nn.Dropout(0.3), nn.Linear(9, 1))
    step: Any = torch.compile(model, backend="zero3", options={**OPTIONS, "accumulate": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = zerofx.GradScaler("cpu", 8.0, window=2)
    rows = torch.randn(2 * BATCHES_PER_EPOCH * num_ranks, WIDTH)
    sampler: Any = DistributedSampler(TensorDataset(rows), seed=3)
    loader = DataLoader(
        TensorDataset(rows), batch_size=2, sampler=sampler, generator=torch.Generator()
    )
    torch.manual_seed(rank)  # each rank drops its own
    first = _go_on(folder, model, optimizer, schedule, scaler)
    if rank == doomed:
        doom("between", 4)
    losses = []
    batches = itertools.islice(_forever(loader, sampler), 2 * first, None)
    for number in range(first, STEPS):
        for _ in range(2):
            (batch,) = next(batches)
            loss = step(batch).square().mean()
            scaler.scale(loss / 2).backward()
            losses.append(loss.item())
            end_at("between")
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if number == 1:
            random = [torch.empty(0)] * num_ranks
            dist.all_gather_object(random, torch.get_rng_state())
            states = (schedule.state_dict(), scaler.state_dict())
            checkpoint.save(Path(folder) / "2", model, optimizer, (number + 1, random, states))
    return losses, [full(param) for param in model.parameters()]


def _go_on(folder: str, model: nn.Module, optimizer: Any, schedule: Any, scaler: Any) -> int:
    """The step at which the run goes on."""
    found = checkpoint.latest(folder)
    if found is None:
        return 0
    number, random, (of_schedule, of_scaler) = checkpoint.load(found, model, optimizer)
    schedule.load_state_dict(of_schedule)
    scaler.load_state_dict(of_scaler)
    torch.set_rng_state(random[dist.get_rank()])
    return number


def _forever(loader: DataLoader[Any], sampler: Any) -> Any:
    for epoch in itertools.count():
        sampler.set_epoch(epoch)
        yield from loader
