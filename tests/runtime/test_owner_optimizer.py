"""Optimizers that need whole matrices do over shards what they do in one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adafactor, Muon, Optimizer

import zerofx
from benchmarks.meters import live_storages
from tests.contract.loops import FAST, close, compiled, config, full, refused
from tests.hard.wire import watched
from tests.models import Mlp, batch
from tests.ranks import run_ranks
from zerofx import OwnerOptimizer, checkpoint
from zerofx.errors import ShardingError, UnsupportedError
from zerofx.runtime.owners import assign_owners


class Shampoo(Optimizer):
    """A preconditioner for each dimension; its inverse root is taken at every step."""

    def __init__(self, params: Any, lr: float = 0.1, eps: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, update = self.state[param], param.grad
                state["step"] = state.get("step", 0) + 1
                for dim, size in enumerate(param.shape):
                    rows = param.grad.movedim(dim, 0).reshape(size, -1)
                    known = state.setdefault(f"outer{dim}", group["eps"] * torch.eye(size))
                    known += rows @ rows.T
                    values, vectors = torch.linalg.eigh(known)
                    root = vectors @ torch.diag(values ** (-0.5 / param.ndim)) @ vectors.T
                    turned = update.movedim(dim, 0)
                    update = (root @ turned.reshape(size, -1)).view(turned.shape).movedim(0, dim)
                param.add_(update, alpha=-group["lr"])


class Counting(Optimizer):
    """Momentum that is corrected for its start by a count of steps."""

    def __init__(self, params: Any, lr: float = 0.1, where: str = "group") -> None:
        super().__init__(params, {"lr": lr})
        self.where, self.number, self.tensor = where, 0, torch.zeros(())

    def _count(self, group: dict[str, Any]) -> int:
        """One more than in the last step, if it is kept until then."""
        if self.where == "itself":
            self.number += 1
            return self.number
        if self.where == "its tensor":
            return int(self.tensor.add_(1))
        if self.where == "state":  # as MADGRAD does
            return int(self.state.setdefault("k", torch.zeros(())).add_(1))  # pyright: ignore
        if self.where == "state of its tensor":
            return int(self.state[self.tensor].setdefault("k", torch.zeros(())).add_(1))
        if self.where == "tensor in group":
            return int(group.setdefault("count", torch.zeros(())).add_(1))
        if self.where == "norms":  # as Prodigy and D-Adaptation do
            group["norm"] = sum(p.grad.norm().item() for p in group["params"])
        group["count"] = group.get("count", 0) + 1
        return group["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            count = self._count(group)
            for param in group["params"]:
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                mean.lerp_(param.grad, 0.1)
                param.sub_(mean / (1 - 0.9**count), alpha=group["lr"])


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


KINDS: dict[str, tuple[Callable[..., Optimizer], Callable[[nn.Module], list[nn.Parameter]]]] = {
    "muon": (partial(Muon, lr=0.05), matrices),
    "adafactor": (partial(Adafactor, lr=0.05), lambda model: list(model.parameters())),
    "shampoo": (Shampoo, lambda model: list(model.parameters())),
    **{
        f"counting in {where}": (partial(Counting, where=where), lambda m: list(m.parameters()))
        for where in ("group", "tensor in group", "state")
    },
}
STEPS = 4


def _model() -> Mlp:
    torch.manual_seed(0)
    return Mlp()


def _alone(kind: str, num_ranks: int, steps: int = STEPS) -> Mlp:
    """One process over the batches of all ranks."""
    model = _model()
    make, chosen = KINDS[kind]
    optimizer = make(chosen(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number in range(steps):
        for rank in range(num_ranks):
            (model(*batch("mlp", rank, number, rows=4)) / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def _trained(kind: str, stage: int, steps: int = STEPS, **options: Any) -> tuple[Any, Any]:
    model = _model()
    make, chosen = KINDS[kind]
    optimizer = OwnerOptimizer(chosen(model), make)  # before the model is sharded
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    torch._dynamo.reset()
    run = torch.compile(model, backend=f"zero{stage}", options={**FAST, **options})
    for number in range(steps):
        run(*batch("mlp", dist.get_rank(), number, rows=4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model, optimizer


def _values(kind: str, stage: int, options: dict[str, Any]) -> dict[str, Tensor]:
    model, _ = _trained(kind, stage, **options)
    return {name: full(param) for name, param in model.named_parameters()}


def _compare(num_ranks: int, kind: str, stage: int, **options: Any) -> None:
    wanted = _alone(kind, num_ranks)
    for found in run_ranks(num_ranks, _values, kind, stage, options):
        for name, value in found.items():
            close(value, wanted.get_parameter(name).detach(), f"{kind} {stage} {name}", 1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_of_a_single_process(stage: int) -> None:
    _compare(2, "muon", stage)


@pytest.mark.parametrize("kind", ["adafactor", "shampoo"])
def test_others_of_a_single_process(kind: str) -> None:
    _compare(2, kind, 3)


def test_four_ranks() -> None:
    for kind in ("muon", "shampoo"):
        _compare(4, kind, 3)
    _compare(4, "muon", 3, replicate=2)


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
    # Momentum, whole at the owners.
    after = _alive()
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
    model, optimizer = _trained(kind, 3, steps=2)
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


COUNTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "group": lambda saved: saved["param_groups"][0]["count"],
    "tensor in group": lambda saved: saved["param_groups"][0]["count"],
    "state": lambda saved: saved["state"]["k"],
}


@pytest.mark.parametrize("where", COUNTS)
def test_counts_of_all_parameters(where: str) -> None:
    """What all owners write for all parameters counts on, as in one process."""
    _compare(2, f"counting in {where}", 3)
    assert run_ranks(2, _count_after, where, 3) == [3, 3]


def _count_after(where: str, steps: int) -> int:
    _, optimizer = _trained(f"counting in {where}", 3, steps)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return int(COUNTS[where](optimizer.state_dict()))


def _saved_with_foreign_keys(path: Path) -> None:
    model, optimizer = _trained("counting in state", 3, 1)
    with refused("'k'", "save the model alone", kind=UnsupportedError):
        checkpoint.save(path, model, optimizer)


def test_checkpoints_name_keys_that_are_no_parameters(tmp_path: Path) -> None:
    run_ranks(2, _saved_with_foreign_keys, tmp_path / "saved")


def _does_not_fit(where: str, message: str) -> None:
    model = _model()
    optimizer = OwnerOptimizer(model.parameters(), Counting, where=where)
    compiled(model, 3)(*batch("mlp", dist.get_rank(), 0)).backward()
    with refused(message, kind=ShardingError):
        optimizer.step()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("itself", "remembers what is lost\n  - number"),
        ("its tensor", "remembers what is lost\n  - tensor"),
        ("state of its tensor", "state of tensors that are no parameters"),
        ("norms", "owners wrote different values to group 0"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(where: str, message: str) -> None:
    run_ranks(2, _does_not_fit, where, message)
