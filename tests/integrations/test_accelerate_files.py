"""Accelerate's loop by a file of which ranks share a model, beside half of the ranks over DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import zerofx
from tests.integrations.examples import nested
from tests.integrations.loops import fresh_state
from tests.ranks import run_ranks
from zerofx.errors import CheckpointError, ConfigError
from zerofx.integrations import Accelerator

FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_allreduce_op": "sum",
    "zero_optimization.stage": 2,
    "tensor_parallel.autotp_size": 2,
    "tensor_parallel.partition_config.layer_specs": [
        {"patterns": ["1"]},
        {"patterns": ["2"], "partition_type": "skip", "grad_allreduce": True},
        {"patterns": ["3"], "partition_type": "row"},
    ],
}
_ROWS = 44


def _recipe(**keys: Any) -> Any:
    return zerofx.from_deepspeed(nested({**FILE, **keys}), inner="eager", min_shard_numel=0)


def _rows() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(*(torch.randn(_ROWS, width, generator=generator) for width in (6, 3)))


class Heads(nn.Module):
    """A norm of each head, of which a rank has half: gradients are sums over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(-1, (-1, 4))).flatten(-2)


class Loop:
    """Over DistributedDataParallel at the rate that sums have where means are taken."""

    def __init__(self, by_file: bool) -> None:
        fresh_state()
        torch.manual_seed(0)
        self.most = 0.6 if by_file else 0.3  # sums of two have twice the norm of means
        self.place = dist.get_rank() // 2 if by_file else dist.get_rank()
        self.it: Any = (
            Accelerator(_recipe(), cpu=True)
            if by_file
            else accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        )
        model = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 8), Heads(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if by_file else 0.2, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 6, gamma=0.5)
        data = DataLoader(_rows(), batch_size=4, shuffle=True)
        self.model, self.optimizer, self.data, self.schedule = self.it.prepare(
            model, optimizer, data, schedule
        )
        torch.manual_seed(100 + self.place)

    def epoch(self, clips: bool) -> list[float]:
        """Losses, norms and rates."""
        found: list[float] = []
        self.model.train()
        for x, y in self.data:
            with self.it.accumulate(self.model):
                loss = F.mse_loss(self.model(x), y)
                self.it.backward(loss)
                if clips and self.it.sync_gradients:
                    norm = self.it.clip_grad_norm_(self.model.parameters(), self.most)
                    found.append(norm.item() / self.most)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            rate = self.optimizer.param_groups[0]["lr"]
            found += [loss.item(), rate / self.optimizer.defaults["lr"]]
        return found

    def evaluate(self) -> tuple[Tensor, list[int]]:
        """What metrics see: rows of tensors, and objects."""
        self.model.eval()
        errors, names = [], []
        with torch.no_grad():
            for x, y in self.it.prepare(DataLoader(_rows(), batch_size=5)):
                errors.append(self.it.gather_for_metrics((self.model(x) - y).square().mean(1)))
                own = [round(1000 * float(each)) for each in x[:, 0]]
                names += self.it.gather_for_metrics(own, use_gather_object=True)
        return torch.cat(errors), names


def trained(by_file: bool, folder: str) -> tuple[Any, ...]:
    loop = Loop(by_file)
    losses = loop.epoch(clips=True)
    if by_file:
        loop.it.save_state(f"{folder}/state")
    losses += loop.epoch(clips=False)
    found = loop.evaluate()
    loop.it.save_model(loop.model, f"{folder}/{by_file}")
    if by_file:
        again = Loop(by_file)
        again.epoch(clips=True)
        again.it.load_state(f"{folder}/state")
        assert again.epoch(clips=False) == losses[-len(again.data) * 2 :]
        fresh_state()
        with pytest.raises(CheckpointError, match="2 parts of a model, and no ranks share"):
            Accelerator(cpu=True).load_shards(Path(folder, "state", "zerofx_0"), nn.Linear(1, 1))
    return losses, *found


def test_a_loop_in_parts_is_that_of_half_the_ranks(tmp_path: Path) -> None:
    """Samples, accumulation, clipping or none, schedules, metrics, states and full weights."""
    wanted = run_ranks(2, trained, False, str(tmp_path), timeout=200)
    for rank, found in enumerate(run_ranks(4, trained, True, str(tmp_path), timeout=200)):
        want = wanted[rank // 2]
        assert found[0] == pytest.approx(want[0], rel=1e-4)
        torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-6)
        assert found[2] == want[2] and len(found[2]) == len(found[1]) == _ROWS
    full = load_file(tmp_path / "True" / "model.safetensors")
    for name, value in load_file(tmp_path / "False" / "model.safetensors").items():
        torch.testing.assert_close(full[name], value, rtol=1e-4, atol=1e-6)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(12))


def streamed() -> list[int]:
    fresh_state()
    it = Accelerator(_recipe(), cpu=True)
    found = [int(x) for batch in it.prepare(DataLoader(Stream(), batch_size=3)) for x in batch]
    with pytest.raises(ConfigError, match="2-norm"):
        it.clip_grad_norm_([], 1.0, norm_type=1)
    fresh_state()
    config = accelerate.DataLoaderConfiguration(dispatch_batches=True)
    it = Accelerator(_recipe(), cpu=True, dataloader_config=config)
    with pytest.raises(ConfigError, match="dispatch_batches"):
        it.prepare(DataLoader(Stream(), batch_size=3))
    fresh_state()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 2 in the file, 3"):
        Accelerator(_recipe(), cpu=True, gradient_accumulation_steps=3)
    return found


def test_streams_and_what_cannot_be_in_parts() -> None:
    halves = [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
    assert run_ranks(4, streamed, timeout=200) == [halves[rank // 2] for rank in range(4)]
