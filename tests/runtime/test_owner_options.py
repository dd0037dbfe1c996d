"""What optimizers remember for all parameters: carried from step to step, or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, serialization
from torch.optim import Optimizer

from tests.contract.loops import compiled, full, refused
from tests.models import batch
from tests.ranks import run_ranks
from tests.runtime.owned import (
    Counting,
    compare,
    make_model,
    trained,
)
from zerofx import OwnerOptimizer, checkpoint
from zerofx.errors import ShardingError, UnsupportedError
from zerofx.runtime import owner_options

COUNTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "group": lambda saved: saved["param_groups"][0]["count"],
    "tensor in group": lambda saved: saved["param_groups"][0]["count"],
    "list in group": lambda saved: saved["param_groups"][0]["count"][0],
    "state": lambda saved: saved["state"]["k"],
}


@pytest.mark.parametrize("where", COUNTS)
def test_counts_of_all_parameters(where: str) -> None:
    """What all owners write for all parameters counts on, as in one process."""
    compare(2, f"counting in {where}", 3)
    assert run_ranks(2, _count_after, where, 3) == [3, 3]


def _count_after(where: str, steps: int) -> int:
    _, optimizer = trained(f"counting in {where}", 3, steps)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    return int(COUNTS[where](optimizer.state_dict()))


def _saved_with_foreign_keys(path: Path) -> None:
    model, optimizer = trained("counting in state", 3, 1)
    with refused("'k'", "save the model alone", kind=UnsupportedError):
        checkpoint.save(path, model, optimizer)


def _saved_with_closures(path: Path) -> None:
    model, saved = trained("counting in group", 3, 1)
    checkpoint.save(path, model, saved)
    optimizer = torch.optim.LBFGS(model.parameters())
    for use in (checkpoint.save, checkpoint.load):
        with refused("LBFGS steps with a closure only", "torch.save", kind=UnsupportedError):
            use(path, model, optimizer)


def test_checkpoints_of_optimizers_that_want_closures_are_refused(tmp_path: Path) -> None:
    run_ranks(2, _saved_with_closures, tmp_path)


def test_checkpoints_name_keys_that_are_no_parameters(tmp_path: Path) -> None:
    run_ranks(2, _saved_with_foreign_keys, tmp_path / "saved")


class Joint(Optimizer):
    """Gradient descent that may look at several parameters for one of them."""

    def __init__(self, params: Any, how: str, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "how": how})

    def _scales(self, group: dict[str, Any], grads: list[Tensor]) -> list[float]:
        norms = [grad.norm().item() for grad in grads]
        if group["how"] == "clips by all":  # as AdaGC does in its first steps
            return [1 / max(1.0, sum(norms))] * len(norms)
        if group["how"] == "pairs":  # as LoRA-RITE does
            return [norms[place ^ 1] for place in range(len(norms))]
        if group["how"] == "in place":
            torch._foreach_mul_(grads, 0.5)
        if group["how"] == "draws":
            return [torch.rand(()).item() for _ in norms]
        return [1 / norm for norm in norms]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            grads = [param.grad for param in params]
            for param, grad, scale in zip(params, grads, self._scales(group, grads), strict=True):
                param.sub_(grad, alpha=group["lr"] * scale)


def _looks(how: str, lr: float, refuses: bool, folder: Path) -> None:
    model = make_model()
    run, optimizer = compiled(model, 3), OwnerOptimizer(model.parameters(), Joint, how=how, lr=lr)
    run(*batch("mlp", dist.get_rank(), 0))
    if how == "clips by all":
        checkpoint.save(folder, model, optimizer)  # torch steps with zeros, for the state
    run(*batch("mlp", dist.get_rank(), 0)).backward()
    if not refuses:
        optimizer.step()
        return
    before, drawn = [full(param) for param in model.parameters()], torch.get_rng_state()
    with refused("another one is in its group", kind=ShardingError):
        optimizer.step()
    assert all(map(torch.equal, before, map(full, model.parameters())))
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.mark.parametrize(
    ("how", "lr", "refuses"),
    [
        ("clips by all", 0.1, True),
        ("clips by all", 0.0, True),  # before a warm-up
        ("pairs", 0.1, True),
        ("apart", 0.1, False),
        ("in place", 0.1, False),
        ("draws", 0.1, False),
    ],
)
def test_optimizers_that_look_at_several_parameters(
    how: str, lr: float, refuses: bool, tmp_path: Path
) -> None:
    run_ranks(2, _looks, how, lr, refuses, tmp_path / "saved")


def _does_not_fit(where: str, message: str) -> None:
    model = make_model()
    optimizer = OwnerOptimizer(model.parameters(), Counting, where=where)
    compiled(model, 3)(*batch("mlp", dist.get_rank(), 0)).backward()
    with refused(message, kind=ShardingError):
        optimizer.step()


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("itself", "remembers what is lost\n  - number"),
        ("its tensor", "remembers what is lost\n  - tensor"),
        ("its list", "remembers what is lost\n  - held"),
        ("state of its tensor", "state of tensors that are no parameters"),
        ("norms", "owners wrote different values to group 0"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused(where: str, message: str) -> None:
    run_ranks(2, _does_not_fit, where, message)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.optim.LBFGS, "LBFGS: a step of it asks for losses"),
        (torch.optim.SGD([torch.ones(1)]), "which makes no optimizer"),
        ({"lr": 0.1}, "which makes no optimizer"),
    ],
)
def test_what_is_no_class_that_fits_is_refused(given: Any, message: str) -> None:
    with refused(message, kind=ShardingError):
        OwnerOptimizer(make_model().parameters(), given, lr=0.1)


def _told() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        restore, asked = serialization.default_restore_location, []
        patch.setattr(
            serialization,
            "default_restore_location",
            lambda storage, kind: asked.append(kind) or restore(storage, "cpu"),
        )
        owner_options._on_own_device(torch.ones(1).untyped_storage(), "cuda:3")
    rank = dist.get_rank()
    comm: Any = SimpleNamespace(size=2, group=dist.group.WORLD)
    return [asked, owner_options.tell({"step": torch.tensor(rank), "names": [rank]}, comm)]


def test_tensors_arrive_on_the_device_of_the_rank_that_hears_of_them() -> None:
    """And not on that of the rank that sends them: `step` is on the GPU with `capturable`."""
    told = [{"step": torch.tensor(rank), "names": [rank]} for rank in range(2)]
    assert run_ranks(2, _told) == [[["cuda"], told]] * 2
