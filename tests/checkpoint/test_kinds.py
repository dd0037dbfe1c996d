"""A checkpoint of another optimizer is refused; state that is made late is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from tests.checkpoint.runs import Run
from tests.contract.loops import refused
from tests.models import Mlp, batch
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError

Make = Callable[[Any], Optimizer]

KINDS: dict[str, Make] = {
    "SGD": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "AdamW": AdamW,
    "amsgrad": lambda params: AdamW(params, amsgrad=True),
    "RMSprop": RMSprop,
    "Adagrad": Adagrad,
    "NAdam": NAdam,
}


def _stepped(model: nn.Module, optimizer: Optimizer, times: int = 1) -> Optimizer:
    for number in range(times):
        for param in model.parameters():
            param.grad = torch.full_like(param, number + 1)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


# Those that may be the same one with other options, which the checkpoint has.
_ALIKE = {("momentum", "SGD"), ("SGD", "momentum"), ("amsgrad", "AdamW")}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize(("saved", "loaded"), [*itertools.permutations(KINDS, 2)])
def test_pairs(tmp_path: Path, saved: str, loaded: str, fresh: bool) -> None:
    model = nn.Linear(3, 2)
    before = KINDS[saved](model.parameters())
    checkpoint.save(tmp_path / "a", model, before if fresh else _stepped(model, before))
    values = [param.detach().clone() for param in model.parameters()]
    optimizer = KINDS[loaded](model.parameters())
    settings = [dict(group) for group in optimizer.param_groups]
    same_class = type(before) is type(optimizer)
    if (saved, loaded) in _ALIKE or (fresh and same_class):
        checkpoint.load(tmp_path / "a", model, optimizer)
        torch.testing.assert_close(optimizer.state_dict(), before.state_dict(), rtol=0, atol=0)
        _stepped(model, optimizer)
        return
    with pytest.raises(CheckpointError, match="another optimizer than") as refusal:
        checkpoint.load(tmp_path / "a", model, optimizer)
    assert "in the checkpoint" in refusal.value.offenders[0]
    assert "load the model alone" in refusal.value.remedy
    assert optimizer.param_groups == settings
    assert all(map(torch.equal, model.parameters(), values))


class _Early(Optimizer):
    """Makes its state when it is constructed, as torch 2.11's Adagrad does, and never again."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for param in self.param_groups[0]["params"]:
            self.state[param]["total"] = torch.ones_like(param)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                total = self.state[param]["total"].add_(param.grad.square())
                param.sub_(param.grad / total.sqrt(), alpha=self.param_groups[0]["lr"])


def test_state_that_is_made_early(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    before = _stepped(model, _Early(model.parameters()))
    checkpoint.save(tmp_path / "a", model, before)
    optimizer = _stepped(nn.Linear(3, 2), _Early(model.parameters()))
    checkpoint.load(tmp_path / "a", model, optimizer)
    torch.testing.assert_close(optimizer.state_dict(), before.state_dict(), rtol=0, atol=0)
    kept = {param: state["total"] for param, state in optimizer.state.items()}
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path / "nothing", model, optimizer)
    assert all(optimizer.state[param]["total"] is total for param, total in kept.items())


def test_both_sets_of_keys_are_named(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    momentum = _stepped(model, KINDS["momentum"](model.parameters()))
    checkpoint.save(tmp_path / "a", model, momentum)
    with pytest.raises(CheckpointError, match="another optimizer than AdamW") as refusal:
        checkpoint.load(tmp_path / "a", model, AdamW(model.parameters()))
    said = "momentum_buffer in the checkpoint, exp_avg, exp_avg_sq, step here"
    assert refusal.value.offenders == (f"weight and 1 more: {said}",)


class _Mine(AdamW):
    """A class of one's own."""


@pytest.mark.parametrize(
    "make",
    [
        _Mine,
        Adam,
        lambda params: AdamW(params, foreach=True),
        lambda params: AdamW(params, fused=True),
        lambda params: AdamW(params, capturable=False, foreach=False),
    ],
)
def test_variants_load(tmp_path: Path, make: Make) -> None:
    model = nn.Linear(3, 2)
    saved = _stepped(model, AdamW(model.parameters()))
    checkpoint.save(tmp_path / "a", model, saved)
    loaded = make(model.parameters())
    checkpoint.load(tmp_path / "a", model, loaded)
    for key in ("step", "exp_avg", "exp_avg_sq"):
        for param in model.parameters():
            assert torch.equal(loaded.state[param][key], saved.state[param][key])


class _Late(AdamW):
    """Begins to average at its second step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if state and state["step"] >= 2:
                    state["average"] = torch.lerp(state.get("average", param), param, 0.1)
                    state["since"] = state.get("since", 2)
                    state["weight"] = torch.ones(3)


def _late(folder: Path) -> None:
    run = Run(3, build=Mlp, min_shard_numel=0)
    run.optimizers = [_Late(run.model.parameters(), lr=1e-2)]
    run.optimizer = run.optimizers[0]
    run.train(range(3))
    checkpoint.save(folder / "a", run.model, run.optimizer)
    wanted, losses = _plain(run), run.train(range(3, 5))
    after = _plain(run)
    fresh = Run(1, seed=1, build=Mlp, min_shard_numel=0)
    fresh.optimizers = [_Late(fresh.model.parameters(), lr=1e-2)]
    fresh.optimizer = fresh.optimizers[0]
    for again in (run, fresh):
        checkpoint.load(folder / "a", again.model, again.optimizer)
        _same(_plain(again), wanted)
        assert again.train(range(3, 5)) == losses
        _same(_plain(again), after)


def _plain(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, param in run.model.named_parameters():
        for key, value in run.optimizer.state[param].items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = whole.clone() if isinstance(whole, torch.Tensor) else whole
    return found


def _same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert any(key.endswith(".average") for key in want)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_state_that_is_made_late(tmp_path: Path) -> None:
    run_ranks(2, _late, tmp_path, timeout=120)


def _other_on_ranks(folder: Path) -> None:
    run = Run(3, build=Mlp, min_shard_numel=0)
    run.optimizers = [SGD(run.model.parameters(), lr=0.1, momentum=0.9)]
    run.train([0])
    checkpoint.save(folder / "a", run.model, run.optimizers)
    before, state = Run.values(run.model), run.optimizer.state
    run.step(*batch("mlp", dist.get_rank(), 1))
    with refused("another optimizer than AdamW", "momentum_buffer", kind=CheckpointError):
        checkpoint.load(folder / "a", run.model, run.optimizer)
    assert run.optimizer.state is state and not state
    assert all(map(torch.equal, Run.values(run.model).values(), before.values()))


def test_on_ranks(tmp_path: Path) -> None:
    run_ranks(2, _other_on_ranks, tmp_path)
