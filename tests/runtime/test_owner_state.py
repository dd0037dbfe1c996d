"""State stays with its owner, in its dtype; all ranks hear of an owner's error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from tests.contract.loops import close, compiled, full
from tests.models import Mlp, batch
from tests.ranks import run_ranks
from tests.runtime.owned import make_model
from zerofx import OwnerOptimizer, checkpoint
from zerofx.errors import ShardingError


class Codes(Optimizer):
    """Momentum in 8 bits, as bitsandbytes keeps it; loading leaves it so."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for number, param in zip(numbers, params, strict=True):
            if number in state_dict["state"]:
                self.state[param]["codes"] = state_dict["state"][number]["codes"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for param in filter(lambda each: each.grad is not None, group["params"]):
                state, mean = self.state[param], param.grad
                if "codes" in state:
                    codes = state["codes"]
                    old = codes if codes.is_floating_point() else codes.float() / 127 - 1
                    mean = mean + old * state["scale"]
                state["scale"] = mean.abs().max().reshape(1)
                state["codes"] = ((mean / state["scale"] + 1) * 127).round().to(torch.uint8)
                param.sub_(mean, alpha=group["lr"])


Change = Callable[[Any, Any, Path], Any]


def _resumed(model: Any, optimizer: Any, path: Path) -> Any:
    fresh = OwnerOptimizer(model.parameters(), Codes)
    fresh.load_state_dict(optimizer.state_dict())
    return fresh


def _loaded(model: Any, optimizer: Any, path: Path) -> Any:
    checkpoint.save(path, model, optimizer)
    fresh = OwnerOptimizer(model.parameters(), Codes)
    checkpoint.load(path, model, fresh)
    return fresh


def _shrunk(model: Any, optimizer: Any, path: Path) -> Any:
    del optimizer.param_groups[0]["params"][0]
    return optimizer


CASES: dict[str, tuple[Any, Change, Change]] = {
    "resumed": (Codes, _resumed, lambda _, optimizer, path: optimizer),
    "loaded": (Codes, _loaded, lambda _, optimizer, path: optimizer),
    "a group shrinks": (lambda params: SGD(params, lr=0.1, momentum=0.9), _shrunk, _shrunk),
}


def _trained(name: str, path: Path) -> list[Tensor]:
    make, change, _ = CASES[name]
    model = make_model()
    run, optimizer = compiled(model, 3), OwnerOptimizer(model.parameters(), make)
    for number in range(4):
        if number == 2:
            optimizer = change(model, optimizer, path)
        run(*batch("mlp", dist.get_rank(), number, rows=4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param) for param in model.parameters()]


def _alone(name: str, path: Path) -> list[Tensor]:
    """The same optimizer in one process, over both ranks' batches."""
    make, _, change = CASES[name]
    model = make_model()
    optimizer = make(model.parameters())
    for number in range(4):
        if number == 2:
            optimizer = change(model, optimizer, path)
        for rank in range(2):
            (model(*batch("mlp", rank, number, rows=4)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_state_stays_with_its_owner(name: str, tmp_path: Path) -> None:
    wanted = _alone(name, tmp_path)
    for found in run_ranks(2, _trained, name, tmp_path / "saved"):
        for ours, theirs in zip(found, wanted, strict=True):
            close(ours, theirs, name, 2e-3)  # a code may be the next one


class Fails(SGD):
    """With the weight of the first layer."""

    def step(self, closure: Any = None) -> Any:
        if any(param.shape == Mlp().layers[0].weight.shape for param in self._all()):
            raise torch.linalg.LinAlgError("eigh failed")
        return super().step(closure)

    def _all(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]


def _failed() -> str:
    model = make_model()
    run, optimizer = compiled(model, 3), OwnerOptimizer(model.parameters(), Fails, lr=0.1)
    run(*batch("mlp", dist.get_rank(), 0)).backward()
    before = copy.deepcopy([full(param) for param in model.parameters()])
    with pytest.raises((ShardingError, torch.linalg.LinAlgError)) as caught:
        optimizer.step()
    assert all(map(torch.equal, before, map(full, model.parameters())))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_all_ranks_hear_of_an_error() -> None:
    said = run_ranks(2, _failed, timeout=30)
    assert sorted("eigh failed" in each for each in said) == [True, True]
    assert sum("failed where parameters have their owner" in each for each in said) == 1
