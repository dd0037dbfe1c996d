"""Optimizers that need whole matrices do over shards what they do in one process."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Muon, Optimizer

import zerofx
from benchmarks.meters import live_storages
from tests.contract.loops import compiled, config, full, refused
from tests.hard.wire import watched
from tests.models import Mlp, batch
from tests.ranks import run_ranks
from tests.runtime.owned import (
    KINDS,
    compare,
    matrices,
    trained,
)
from zerofx import OwnerOptimizer, checkpoint
from zerofx.errors import ShardingError
from zerofx.runtime.owners import assign_owners


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_of_a_single_process(stage: int) -> None:
    compare(2, "muon", stage)


@pytest.mark.parametrize("kind", ["adafactor", "shampoo"])
def test_others_of_a_single_process(kind: str) -> None:
    compare(2, kind, 3)


def test_four_ranks() -> None:
    for kind in ("muon", "shampoo"):
        compare(4, kind, 3)
    compare(4, "muon", 3, replicate=2)


class Square(nn.Module):
    """As many equal matrices as four ranks share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def _measured() -> None:
    """In units of the bytes of all matrices, at stage 3: seen at the process group, and alive."""
    model, num_ranks = Square(), dist.get_world_size()
    run = compiled(model, 3)
    run(torch.randn(4, 64)).backward()
    optimizer = OwnerOptimizer(model.parameters(), Muon, lr=0.01)
    size = 4 * sum(param.numel() for param in model.parameters())
    grads = [param.grad for param in model.parameters()]  # a tensor is found once read
    before, alive = _alive(), list[int]()
    optimizer.step()
    # Momentum, whole at the owners; gloo's thread lets go of what they told each other when it can.
    deadline = time.monotonic() + 1
    while (after := _alive()) - before != size / num_ranks and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after - before == size / num_ranks, (before, after, size / num_ranks)
    held = [value.shape for entry in optimizer.state.values() for value in entry.values()]
    assert held == [(64, 64)] * (8 // num_ranks)
    before = _alive()
    with watched(lambda: alive.append(_alive())) as wire:
        optimizer.step()
    assert wire.sent_bytes(num_ranks) == 3 * size / num_ranks * (num_ranks - 1) / num_ranks
    assert max(alive) - before == 2 * size / num_ranks
    assert _alive() == before
    del grads


def _alive() -> int:
    gc.collect()
    return sum(live_storages()[0].values())


def test_bytes_sent_and_held() -> None:
    run_ranks(2, _measured)
    run_ranks(4, _measured)


def _saved(path: Path, kind: str) -> dict[str, Tensor]:
    model, optimizer = trained(kind, 3, steps=2)
    for group in optimizer.param_groups:
        del group["initial_lr"]  # the schedule's, which is not saved here
    checkpoint.save(path, model, optimizer)
    return _tensors(model, optimizer)


def _loaded(path: Path, kind: str, shard_first: bool) -> list[dict[str, Tensor]]:
    """State as it was loaded, after a step, and as another optimizer takes that over."""
    make, chosen = KINDS[kind]
    model = Mlp()
    if shard_first:
        zerofx.shard(model, config(1))
    optimizer = OwnerOptimizer(chosen(model), make)
    checkpoint.load(path, model, optimizer)
    run = compiled(model, 1)
    run(*batch("mlp", 0, 9, rows=4)).backward()
    loaded = _tensors(model, optimizer)
    optimizer.step()
    again = OwnerOptimizer(chosen(model), make)
    again.load_state_dict(optimizer.state_dict())
    return [loaded, _tensors(model, optimizer), _tensors(model, again)]


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    entries = optimizer.state_dict()["state"]
    found = {name: full(param) for name, param in model.named_parameters()}
    for number, entry in entries.items():
        for key, value in entry.items():
            found[f"{number}.{key}"] = full(torch.as_tensor(value))
    return found


@pytest.mark.parametrize("kind", ["muon", "shampoo"])
def test_checkpoints_at_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    """The plain optimizer of one process loads them too, and goes on alike."""
    path = tmp_path / "saved"
    saved = run_ranks(2, _saved, path, kind)[0]
    make, chosen = KINDS[kind]
    alone = Mlp()
    optimizer = make(chosen(alone))
    checkpoint.load(path, alone, optimizer)
    alone(*batch("mlp", 0, 9, rows=4)).backward()
    assert _differ(_tensors(alone, optimizer), saved) == 0
    optimizer.step()
    for num_ranks, shard_first in ((4, True), (2, False)):
        for loaded, stepped, again in run_ranks(num_ranks, _loaded, path, kind, shard_first):
            assert _differ(loaded, saved) == _differ(again, stepped) == 0
            assert _differ(stepped, _tensors(alone, optimizer)) < 1e-5


def _differ(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[name] - wanted[name]).abs().max().item() for name in wanted)


def _refused() -> None:
    first, second = (zerofx.shard(Mlp(), config(3)) for _ in range(2))
    for params in (
        [*first.parameters(), *second.parameters()],
        [*first.parameters(), *Mlp().parameters()],
    ):
        optimizer = OwnerOptimizer(matrices(nn.ParameterList(params)), Muon)
        with refused("one OwnerOptimizer for each model", kind=ShardingError):
            optimizer.step()


def test_parameters_of_several_models_are_refused() -> None:
    run_ranks(2, _refused)


def test_owners_own_about_equally_much() -> None:
    sizes = [100, 1, 50, 50, 30, 70, 20]
    owners = assign_owners([sizes], 3)[0]
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == rank) for rank in range(3)]
    assert max(loads) <= sum(sizes) / 3 + 1 + 19 and sum(loads) == sum(sizes)
    assert assign_owners([sizes, [9, 900]], 3)[0] == owners
