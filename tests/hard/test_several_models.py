"""Several compiled models in one process, and functions over several models."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import zerofx
from tests.hard.pair import (
    EAGER,
    INDUCTOR,
    Pair,
    average,
    descend,
    draw,
    full,
    same,
    same_gradients,
    same_parameters,
)
from tests.ranks import run_ranks
from zerofx import ZeroConfig


def _mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def _gan(stage: int, other_stage: int) -> None:
    """Alternating steps; the discriminator sees detached samples, the generator does not."""
    generator = Pair(_mlp(4, 9, 6), stage, rtol=1e-5)
    discriminator = Pair(_mlp(6, 7, 1), other_stage, rtol=1e-5)
    one = torch.ones(5, 1)
    for number in range(3):
        noise, real = draw(5, 4, seed=number), draw(5, 6, seed=100 + number)
        for kind in ("run", "plain"):
            make, judge = getattr(generator, kind), getattr(discriminator, kind)
            fake = make(noise).detach()
            (F.softplus(judge(fake)) + F.softplus(-judge(real))).mean().backward()
        discriminator.step()
        for kind in ("run", "plain"):
            make, judge = getattr(generator, kind), getattr(discriminator, kind)
            F.mse_loss(judge(make(noise)), one).backward()
        generator.step()
        # The discriminator's gradients of the generator's step are thrown away.
        average(discriminator.plain)
        same_gradients(discriminator.model, discriminator.plain, 1e-5)
        discriminator.optimizer.zero_grad()
        discriminator.plain.zero_grad()


@pytest.mark.parametrize(("stage", "other_stage"), [(0, 0), (1, 3), (2, 2), (3, 3), (3, 1)])
def test_generator_and_discriminator(stage: int, other_stage: int) -> None:
    run_ranks(2, _gan, stage, other_stage)


def _teacher(stage: int, inner: str) -> None:
    options, rtol = (EAGER, 0.0) if inner == "eager" else (INDUCTOR, 1e-5)
    teacher = _mlp(7, 9, 5)
    plain_teacher = copy.deepcopy(teacher)
    guide = torch.compile(teacher, backend=f"zero{stage}", options=options)
    student = Pair(_mlp(7, 5), stage, options, rtol=rtol)

    def loss(run: nn.Module, number: int) -> Tensor:
        x = draw(4, 7, seed=number)
        with torch.no_grad():
            target = (guide if run is student.run else plain_teacher)(x)
        return F.mse_loss(run(x), target)

    student.train(loss, 3)
    same_parameters(teacher, plain_teacher)


@pytest.mark.parametrize("stage", [1, 3])
def test_teacher_and_student(stage: int) -> None:
    run_ranks(2, _teacher, stage, "eager")


class Taught(nn.Module):
    """Keeps its teacher where neither parameters nor `state_dict` find it."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self._hidden = [_mlp(7, 9, 5).requires_grad_(False)]
        self.net, self.breaks = _mlp(7, 11, 5), breaks

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self._hidden[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        return (self.net(x) - wanted).square().mean()


def _hidden(breaks: bool, how: str) -> None:
    torch.manual_seed(0)
    model = Taught(breaks)
    pair = Pair(model, 3, rtol=1e-6)
    if how == "sharded first":
        zerofx.shard(model, ZeroConfig(stage=3, inner="eager", min_shard_numel=0))
    pair.train(lambda run, number: run(draw(4, 7, seed=number + 50 * dist.get_rank())))
    assert not any(isinstance(p, DTensor) for p in model._hidden[0].parameters())


@pytest.mark.parametrize("how", ["plain", "sharded first"])
@pytest.mark.parametrize("breaks", [False, True])
def test_a_teacher_that_is_no_submodule_stays_whole(breaks: bool, how: str) -> None:
    run_ranks(2, _hidden, breaks, how)


def test_teacher_and_student_through_inductor() -> None:
    run_ranks(2, _teacher, 3, "inductor", timeout=220)


def _one_function(stage: int, copied: bool) -> None:
    """One graph over two sharded models; the second may be a deep copy of the first.

    Buffers of both are rank 0's when the graph begins.
    """
    models = [nn.Sequential(_mlp(7, 6, 7), nn.BatchNorm1d(7))]
    other = copy.deepcopy(models[0]) if copied else nn.Sequential(_mlp(7, 5, 7), nn.BatchNorm1d(7))
    models.append(other)
    plain = copy.deepcopy(models)
    for model in models:
        zerofx.shard(model, ZeroConfig(stage=stage, inner="eager", min_shard_numel=0))

    def chain(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(torch.tanh(first(x))).square().mean()

    run = torch.compile(chain, backend=f"zero{stage}", options=EAGER)
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    for number in range(3):
        losses = []
        for buffer in [buffer for model in plain for buffer in model.buffers()]:
            dist.broadcast(buffer, 0)
        for function, pair in ((run, models), (chain, plain)):
            loss = function(pair[0], pair[1], draw(4, 7, seed=number))
            loss.backward()
            losses.append(loss.detach())
        same(*losses, "loss")
        for ours, theirs in zip(models, plain, strict=True):
            average(theirs)
            same_gradients(ours, theirs)
            descend(theirs, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        for ours, theirs in zip(models, plain, strict=True):
            same_parameters(ours, theirs)
            for got, want in zip(ours.buffers(), theirs.buffers(), strict=True):
                same(got.double(), want.double(), "buffer")


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
def test_one_function_over_two_models(stage: int, copied: bool) -> None:
    run_ranks(2, _one_function, stage, copied)


class Actor(nn.Module):
    """A model inside a model: the whole is compiled for training, a part for acting."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _mlp(7, 9), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def _compiled_twice(stage: int) -> None:
    pair = Pair(Actor(), stage)

    def loss(run: nn.Module, number: int) -> Tensor:
        return run(draw(4, 7, seed=number)).square().mean()

    pair.train(loss, 1)
    part = torch.compile(pair.model.get_submodule("body"), backend=f"zero{stage}", options=EAGER)
    x = draw(4, 7, seed=50)
    for number in range(2):
        with torch.no_grad():
            same(part(x), pair.plain.get_submodule("body")(x), "part")
        pair.train(loss, [number])
    full(next(pair.model.parameters()))


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_and_a_part_of_it(stage: int) -> None:
    run_ranks(2, _compiled_twice, stage)
