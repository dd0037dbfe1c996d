"""Forwards without gradients, and forwards without a backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.hard.pair import EAGER, INDUCTOR, STAGES, Pair, draw, same
from tests.models import make
from tests.ranks import run_ranks


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.BatchNorm1d(13), nn.Tanh(), nn.Linear(13, 5))


def _loss(run: nn.Module, number: int) -> Tensor:
    return run(draw(4, 7, seed=number)).square().mean()


def _evaluate(pair: Pair, mode: type) -> None:
    """Both models agree in evaluation, on this rank's own data."""
    pair.run.eval()
    pair.plain.eval()
    with mode():
        x = draw(6, 7, seed=99)
        same(pair.run(x), pair.plain(x), "evaluation", pair.rtol)
    pair.run.train()
    pair.plain.train()


def _evaluate_and_train(stage: int, first: str, inner: str) -> None:
    options, rtol = (EAGER, 0.0) if inner == "eager" else (INDUCTOR, 1e-5)
    # BatchNorm's statistics follow rank 0's data, which the plain model does not do.
    model = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Tanh(), nn.Linear(13, 5))
    pair = Pair(model, stage, options, rtol=rtol)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    _evaluate(pair, modes[first])
    for step in range(2):
        pair.train(_loss, [step])
        for mode in modes.values():
            _evaluate(pair, mode)


@pytest.mark.parametrize("first", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("stage", [1, 3])
def test_evaluation_first_and_between_steps(stage: int, first: str) -> None:
    run_ranks(2, _evaluate_and_train, stage, first, "eager")


def test_evaluation_through_inductor() -> None:
    run_ranks(2, _evaluate_and_train, 3, "inference_mode", "inductor", timeout=120)


def _forward_alone(stage: int) -> None:
    pair = Pair(_model().eval(), stage)
    for number in range(3):
        _loss(pair.run, number)
        pair.train(_loss, [number])
        kept = _loss(pair.run, number)
    del kept
    pair.train(_loss, 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_forward_may_have_no_backward(stage: int) -> None:
    run_ranks(2, _forward_alone, stage)


def _evaluated_first(stage: int) -> None:
    """An evaluation is the first to need the 16-bit copy after a step, which then is written."""
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))
    half = {"param_dtype": torch.bfloat16, "grad_dtype": torch.bfloat16}
    run = torch.compile(model, backend=f"zero{stage}", options={**EAGER, **half})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(2):
        run(draw(4, 6, seed=number)).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            run(draw(4, 6))
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
        run(draw(4, 6)).sum().backward()


@pytest.mark.parametrize("stage", [1, 2])
def test_inference_between_a_step_and_an_edit(stage: int) -> None:
    run_ranks(2, _evaluated_first, stage)


def _edit(stage: int) -> None:
    """Weights edited under no_grad or loaded are what the next forward reads."""
    pair = Pair(make("mlp"), stage)
    batch = draw(4, 7), draw(4, 5)

    def loss(run: nn.Module, number: int) -> Tensor:
        return run(*batch)

    pair.train(loss, 1)
    with torch.no_grad():
        for ours, theirs in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            ours.mul_(0.5)
            theirs.mul_(0.5)
        same(loss(pair.run, 0), loss(pair.plain, 0), "loss after an edit")
    pair.train(loss, 1)
    state = {name: value.clone() for name, value in pair.model.state_dict().items()}
    before = loss(pair.plain, 0).detach()
    pair.train(loss, 1)
    pair.model.load_state_dict(state)
    with torch.no_grad():
        same(loss(pair.run, 0), before, "loss after loading")


@pytest.mark.parametrize("stage", STAGES)
def test_edited_and_loaded_weights_are_seen(stage: int) -> None:
    run_ranks(2, _edit, stage)
