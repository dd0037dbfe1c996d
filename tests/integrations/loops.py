"""One Accelerate loop, for Accelerate's own DistributedDataParallel and for zerofx."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.checkpoint.runs import full
from zerofx import ZeroConfig
from zerofx.integrations import Accelerator

ROWS = 44  # not a multiple of what two ranks take at once


class Net(nn.Module):
    """Parameters that divide unevenly, with dropout, so that random states matter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(7, 13), nn.Tanh(), nn.Dropout(0.2), nn.Linear(13, 11), nn.Linear(11, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def config_of(stage: int) -> ZeroConfig:
    return ZeroConfig(stage=stage, inner="eager", min_shard_numel=8)  # type: ignore[arg-type]


def fresh_state() -> None:
    """Accelerate keeps its state per process, and jobs share a process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(
        torch.randn(ROWS, 7, generator=generator), torch.randn(ROWS, 3, generator=generator)
    )


class Loop:
    """Model, optimizer, scheduler and data, prepared.

    Args:
        stage: of zerofx; `None`: Accelerate alone, which wraps in DistributedDataParallel.
        kwargs: of the accelerator.
    """

    def __init__(self, stage: int | None, **kwargs: Any) -> None:
        fresh_state()
        torch.manual_seed(0)
        kwargs["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator: Any = (
            accelerate.Accelerator(cpu=True, **kwargs)
            if stage is None
            else Accelerator(config_of(stage), cpu=True, **kwargs)
        )
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        order = torch.Generator().manual_seed(5)
        data = DataLoader(rows(), batch_size=4, shuffle=True, generator=order)
        # The optimizer before the model: the order must not matter.
        self.optimizer, self.model, self.data, self.scheduler = self.accelerator.prepare(
            optimizer, model, data, scheduler
        )
        torch.manual_seed(100 + self.accelerator.process_index)

    def epoch(self, number: int, first: int = 0, save: tuple[int, str] = (-1, "")) -> list[float]:
        """Losses and norms from batch `first` on; saves once, before a given batch."""
        self.model.train()
        losses = []
        self.data.set_epoch(number)
        data = accelerate.skip_first_batches(self.data, first) if first else self.data
        for place, (x, y) in enumerate(data, first):
            if place == save[0]:
                self.accelerator.save_state(save[1], safe_serialization=True)
            with self.accelerator.accumulate(self.model):
                loss = F.mse_loss(self.model(x), y)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    losses.append(norm.item())
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def evaluate(self) -> tuple[int, Tensor]:
        """The number of rows that a metric sees, and their mean loss."""
        self.model.eval()
        data = self.accelerator.prepare(DataLoader(rows(), batch_size=4))
        found = []
        with torch.no_grad():
            for x, y in data:
                loss = F.mse_loss(self.model(x), y, reduction="none").mean(1)
                found.append(self.accelerator.gather_for_metrics(loss))
        every = torch.cat(found)
        return len(every), every.mean()

    def values(self) -> Mapping[str, Tensor]:
        """Full values of the plain model."""
        plain = self.accelerator.unwrap_model(self.model)
        return {name: full(value) for name, value in plain.state_dict().items()}


def trained(stage: int | None, **kwargs: Any) -> tuple[Any, ...]:
    """Two epochs, then everything that can be compared."""
    loop = Loop(stage, **kwargs)
    losses = loop.epoch(0) + loop.epoch(1)
    return losses, loop.values(), loop.evaluate(), type(loop.model).__name__


def resumed(stage: int, folder: str, again: int) -> tuple[Any, ...]:
    """A run of two epochs that saves on its way, and one that goes on from there."""
    whole = Loop(stage)
    want = (whole.epoch(0, save=(3, folder)) + whole.epoch(1))[6:]
    loop = Loop(again)
    loop.accelerator.load_state(folder)
    got = loop.epoch(0, 3) + loop.epoch(1)
    files = sorted(path.name for path in Path(folder).iterdir())
    return got, want, loop.values(), whole.values(), files
