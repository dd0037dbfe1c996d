"""Unusual backwards: repeated, failed, of higher order, watched for anomalies."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw, full, same
from tests.models import batch, make
from tests.ranks import run_ranks


def _loss(run: nn.Module, number: int) -> Tensor:
    return run(*batch("mlp", dist.get_rank(), number))


def _retained(stage: int) -> None:
    """Two backwards of one forward, and two forwards before their backwards."""
    pair = Pair(make("mlp"), stage, rtol=1e-6)
    pair.backward(_loss, 0, retain_graph=True)
    pair.step()
    losses = [
        [run(*batch("mlp", dist.get_rank(), n)) for n in (1, 2)] for run in (pair.run, pair.plain)
    ]
    for first, second in losses:
        second.backward(retain_graph=True)
        first.backward()
        (2 * second).backward()
    pair.step()
    pair.train(_loss, [3])


@pytest.mark.parametrize("stage", [1, 3])
def test_repeated_and_interleaved_backwards(stage: int) -> None:
    run_ranks(2, _retained, stage)


class Likelihood(nn.Module):
    """Cholesky factors are checked by an effect, whose token comes before all other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(()))
        self.net, self.mean = nn.Linear(4, 5), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.net(x)
        noise = nn.functional.softplus(self.noise) * torch.eye(len(x))
        factor = torch.linalg.cholesky(features @ features.mT + noise)
        return torch.linalg.solve_triangular(factor, self.mean(x), upper=False).square().mean()


def _effects(stage: int, inner: str) -> None:
    pair = Pair(Likelihood(), stage, EAGER if inner == "eager" else INDUCTOR, lr=0.01, rtol=1e-4)
    pair.train(lambda run, number: run(draw(6, 4, seed=number)))


@pytest.mark.parametrize(
    ("stage", "inner"), [(0, "eager"), (1, "inductor"), (2, "eager"), (3, "eager")]
)
def test_effects_in_forward(stage: int, inner: str) -> None:
    run_ranks(2, _effects, stage, inner)


class _TwoOutputs(torch.autograd.Function):
    """Gives a weight a gradient of zeros if its first output is not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return x @ weight, 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        of_product, of_double = grads
        to_x = 0 if of_product is None else of_product @ weight.t()
        to_weight = None if of_product is None else x.t() @ of_product
        return to_x + 2 * of_double, to_weight


class HalfUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        _, double = _TwoOutputs.apply(self.first(x), self.weight)
        return self.last(torch.tanh(double)).square().mean()


def _half_used(stage: int) -> None:
    pair = Pair(HalfUsed(), stage, rtol=1e-6)
    for number in range(2):
        pair.backward(lambda run, number: run(draw(4, 6, seed=number)), number)
        if pair.plain.weight.grad is None:  # compiled, it is zeros, as with torch's own backends
            pair.plain.weight.grad = torch.zeros(6, 6)
        pair.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_that_depend_on_no_gradient(stage: int) -> None:
    run_ranks(2, _half_used, stage)


class _Fails(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        raise FloatingPointError("the backward fails")


class Breakable(nn.Module):
    """Breaks the graph in the middle, where a step may raise; in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, fail: str) -> Tensor:
        x = _middle(torch.tanh(self.first(x)), fail)
        return self.second(x).square().mean()


@torch.compiler.disable
def _middle(x: Tensor, fail: str) -> Tensor:
    if fail == "forward":
        raise FloatingPointError("the forward fails")
    return _Fails.apply(x) if fail == "backward" else x


def _recovers(stage: int, options: dict[str, int]) -> None:
    pair = Pair(Breakable(), stage, {**EAGER, **options}, rtol=1e-6)

    def loss(run: nn.Module, number: int) -> Tensor:
        return run(draw(4, 7, seed=number), "")

    micro = options.get("accumulate", 1)

    def step(first: int) -> None:
        for number in range(first, first + micro):
            pair.backward(loss, number)
        pair.step()

    step(0)
    for number, fail in enumerate(["forward", "backward", "forward", "backward"], 10):
        for run in (pair.run, pair.plain):
            with pytest.raises(FloatingPointError):
                run(draw(4, 7, seed=number), fail).backward()
        pair.optimizer.zero_grad()
        pair.plain.zero_grad()
        step(number)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_after_an_exception(stage: int, accumulate: int) -> None:
    run_ranks(2, _recovers, stage, {"accumulate": accumulate})


def _anomaly(stage: int) -> None:
    pair = Pair(make("mlp"), stage, rtol=1e-6)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        pair.train(_loss, 2)


@pytest.mark.parametrize("stage", [1, 3])
def test_anomaly_mode(stage: int) -> None:
    run_ranks(2, _anomaly, stage)


def _penalty(run: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def _gradient_penalty(stage: int) -> None:
    """A gradient penalty, op by op: the sharded model is called without `torch.compile`."""
    model = nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1))
    pair = Pair(model, stage, rtol=1e-5)
    pair.train(lambda run, number: run(draw(4, 7, seed=number)).square().mean(), 1)
    for number in range(2):
        values = [_penalty(each, draw(4, 7, seed=number)) for each in (pair.model, pair.plain)]
        same(values[0].detach(), values[1].detach(), "penalty", 1e-6)
        for value in values:
            value.backward()
        pair.step()


@pytest.mark.parametrize("stage", [0, 3])
def test_gradient_penalty_in_eager(stage: int) -> None:
    run_ranks(2, _gradient_penalty, stage)


def _hvp(stage: int) -> None:
    """A Hessian-vector product over the parameters is the mean of the ranks' own."""
    pair = Pair(nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 5)), stage)
    pair.train(lambda run, number: run(draw(4, 7, seed=number)).square().mean(), 1)
    products: list[list[Tensor]] = []
    for model in (pair.model, pair.plain):
        params = list(model.parameters())
        loss = model(draw(4, 7, seed=5)).square().mean()
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        along = sum(
            (slope * param.detach()).sum() for slope, param in zip(slopes, params, strict=True)
        )
        products.append([full(each) for each in torch.autograd.grad(along, params)])
    for name, ours, theirs in zip(dict(pair.model.named_parameters()), *products, strict=True):
        # Ours is d(mean gradient)/dw along w, which is the same on every rank.
        dist.all_reduce(theirs)
        same(ours, theirs / dist.get_world_size(), f"product of {name}", 1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_hessian_vector_product_in_eager(stage: int) -> None:
    run_ranks(2, _hvp, stage)


def _norm_penalty(run: nn.Module, x: Tensor) -> Tensor:
    """A loss that gives gradients of its own: a penalty without its gradient went unnoticed."""
    loss = run(x).square().mean()
    slopes = torch.autograd.grad(loss, list(run.parameters()), create_graph=True)
    return loss + torch.stack([slope.square().sum() for slope in slopes]).sum()


def _compiled_double_backward(stage: int) -> list[str]:
    pair = Pair(nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)), stage)
    messages: list[str] = []
    # Where torch gives buffers away, that alone forbids what the second one does.
    with torch._functorch.config.patch(donated_buffer=False):
        for penalty in (_penalty, _norm_penalty):
            with pytest.raises(RuntimeError) as refused:
                penalty(pair.run, draw(4, 7)).backward()
            messages.append(str(refused.value))
    return messages


@pytest.mark.parametrize("stage", [0, 3])
def test_double_backward_through_a_compiled_model_is_refused(stage: int) -> None:
    for messages in run_ranks(2, _compiled_double_backward, stage):
        assert all("double backward" in message for message in messages), messages


def _penalty_of_norms(stage: int) -> None:
    """The sharded model is called without `torch.compile`; all ranks have the same batch."""
    pair = Pair(nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, 1)), stage)
    pair.train(lambda run, number: run(draw(4, 7, seed=number)).square().mean(), 1)
    for model in (pair.model, pair.plain):
        _norm_penalty(model, torch.linspace(-1, 1, 28).view(4, 7)).backward()
    pair.step()


@pytest.mark.parametrize("stage", [1, 3])
def test_penalty_of_gradient_norms_in_eager(stage: int) -> None:
    run_ranks(2, _penalty_of_norms, stage)
