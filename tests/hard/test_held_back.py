"""Gradients that wait for the last backward of a step, while other things happen to them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.hard.pair import EAGER, STAGES, Pair, average, draw, full, same, same_gradients
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import UnsupportedError


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 2))


def _attacked(run: Any, number: int) -> Tensor:
    """Fast gradient sign: a gradient of the input, then the loss of what it points to."""
    x = draw(4, 7, seed=number).requires_grad_()
    (towards,) = torch.autograd.grad(run(x).square().mean(), x)
    loss: Tensor = run((x + 0.1 * towards.sign()).detach()).square().mean()
    return loss


def _adversarial(stage: int, how: str, replicate: int) -> None:
    options = {**EAGER, "accumulate": 3} if how == "accumulate" else EAGER
    if replicate > 1:
        options = {**options, "replicate": replicate}
    pair = Pair(_stack(), stage, options, rtol=1e-5)
    for number in range(6):
        waits = number % 3 < 2
        held = how == "no_sync" and waits
        with zerofx.no_sync(pair.model) if held else contextlib.nullcontext():
            pair.backward(_attacked, number)
        if not waits:
            pair.step()


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_asked_for_on_the_way_are_not_counted(stage: int, how: str) -> None:
    run_ranks(2, _adversarial, stage, how, 1)


def test_gradients_asked_for_on_the_way_on_a_hybrid_mesh() -> None:
    run_ranks(4, _adversarial, 3, "no_sync", 2, timeout=120)


def _gradients_of_weights(stage: int) -> None:
    """`autograd.grad` gets means, whatever waits."""
    pair = Pair(_stack(), stage, rtol=1e-6)
    x = draw(4, 7)
    with zerofx.no_sync(pair.model):
        pair.backward(lambda run, _: run(x).square().mean())
        asked = torch.autograd.grad(pair.run(x).mean(), list(pair.model.parameters()))
    wanted = torch.autograd.grad(pair.plain(x).mean(), list(pair.plain.parameters()))
    for param, grad in zip(pair.plain.parameters(), wanted, strict=True):
        param.grad, grad_so_far = grad, param.grad
        average(nn.ParameterList([param]))
        param.grad, mean = grad_so_far, param.grad
        same(full(asked[0]), mean, "gradient", 1e-6)
        asked = asked[1:]
    pair.backward(lambda run, _: run(x).mean())
    average(pair.plain)
    same_gradients(pair.model, pair.plain, 1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_weights_asked_for_meanwhile(stage: int) -> None:
    run_ranks(2, _gradients_of_weights, stage)


def _loaded_on_the_way(how: str, folder: str) -> None:
    """Weights go back, and what was added up stays, as in a plain loop."""
    options = {**EAGER, "accumulate": 2} if how == "accumulate" else EAGER
    pair = Pair(_stack(), 1, options, rtol=1e-6)
    pair.optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.1, momentum=0.5)  # has state

    def loss(run: Any, number: int) -> Tensor:
        result: Tensor = run(draw(4, 7, seed=number)).square().mean()
        return result

    def descend(*numbers: int, load: bool = False) -> None:
        with zerofx.no_sync(pair.model) if how == "no_sync" else contextlib.nullcontext():
            pair.backward(loss, numbers[0])
        if load:
            checkpoint.load(folder, pair.model, pair.optimizer)
            pair.plain.load_state_dict(saved)
        pair.backward(loss, numbers[1])
        average(pair.plain)
        same_gradients(pair.model, pair.plain, 1e-6)
        pair.optimizer.step()
        pair.optimizer.zero_grad()
        pair.plain.load_state_dict({k: full(v) for k, v in pair.model.state_dict().items()})
        pair.plain.zero_grad()

    descend(0, 1)
    saved = {name: full(value) for name, value in pair.model.state_dict().items()}
    checkpoint.save(folder, pair.model, pair.optimizer)
    descend(2, 3)
    descend(4, 5, load=True)
    descend(6, 7)


@pytest.mark.parametrize("how", ["no_sync", "accumulate"])
def test_a_checkpoint_is_loaded_on_the_way(how: str, tmp_path: Path) -> None:
    run_ranks(2, _loaded_on_the_way, how, str(tmp_path / "there"))


def _clip(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def _halve(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def _replace(model: nn.Module) -> None:
    """The new gradient may get the address of the old one."""
    for param in model.parameters():
        param.grad = None
        param.grad = torch.zeros_like(param)


def _make_plain(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.zeros(param.shape)


def _written(stage: int) -> list[str]:
    pair, said = Pair(_stack(), stage), list[str]()
    with torch.no_grad():
        pair.run(draw(4, 7))
    # Hooks that were there before anything was held back.
    hooks = [each.register_post_accumulate_grad_hook(_halve) for each in pair.model.parameters()]
    for write in (None, _clip, *[_replace] * 5, _make_plain):
        with zerofx.no_sync(pair.model):
            pair.run(draw(4, 7)).sum().backward()
        if write is not None:
            write(pair.model)
        try:
            pair.run(draw(4, 7)).sum().backward()
            said.append("")
        except UnsupportedError as error:
            said.append(str(error))
        while hooks:
            hooks.pop().remove()
        pair.model.zero_grad()
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_they_are_not_clipped_one_by_one(stage: int) -> None:
    for said in run_ranks(2, _written, stage):
        for each in said:
            assert ("0.weight" in each and "after the last backward" in each) == (stage < 2), said


def _zero(grad: Tensor) -> None:
    grad.zero_()


def _zero_data(grad: Tensor) -> None:
    grad.data.zero_()


def _zero_detached(grad: Tensor) -> None:
    grad.detach().zero_()


def _cleared(stage: int, clear: Callable[[Tensor], None] | None) -> None:
    pair = Pair(_stack(), stage)
    for number in range(3):
        with zerofx.no_sync(pair.model):
            pair.backward(lambda run, _: run(draw(4, 7)).square().mean(), number)
        for model in (pair.model, pair.plain):
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            if clear is None:
                torch._foreach_zero_(grads)
            else:
                for grad in grads:
                    clear(grad)
    pair.backward(lambda run, _: run(draw(4, 7)).square().mean())
    pair.step()


@pytest.mark.parametrize("clear", [_zero, _zero_data, _zero_detached, None])
def test_every_way_to_clear_drops_the_sum(clear: Callable[[Tensor], None] | None) -> None:
    run_ranks(2, _cleared, 1, clear)


def _cleared_by_a_program(stage: int) -> float:
    pair = Pair(_stack(), stage)
    pair.backward(lambda run, _: run(draw(4, 7)).square().mean())

    def clear() -> None:
        for param in pair.model.parameters():
            if param.grad is not None:
                param.grad.zero_()

    torch.compile(clear, backend="aot_eager")()
    return sum(full(param.grad).abs().sum().item() for param in pair.model.parameters())


def test_a_compiled_function_clears_gradients() -> None:
    assert run_ranks(2, _cleared_by_a_program, 1) == [0.0] * 2


class Broken(nn.Module):
    """Two programs: a graph break lies between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 9), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(torch.tanh(x)).square().mean()


def _steps_in_backward(stage: int) -> None:
    pair = Pair(Broken(), stage, rtol=1e-6)
    with torch.no_grad():
        pair.run(draw(4, 7))
    for model in (pair.model, pair.plain):
        for param in model.parameters():
            optimizer = torch.optim.SGD([param], lr=0.1)

            def update(param: Tensor, optimizer: Any = optimizer, model: Any = model) -> None:
                if model is pair.plain:
                    average(nn.ParameterList([param]))
                    with torch.no_grad():
                        param.add_(param.grad, alpha=-0.1)  # pyright: ignore[reportArgumentType]
                    param.grad = None
                else:
                    optimizer.step()
                    optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(update)
    for number in range(3):
        pair.backward(lambda run, number: run(draw(4, 7, seed=number)), number)
    for (name, ours), theirs in zip(
        pair.model.named_parameters(), pair.plain.parameters(), strict=True
    ):
        same(full(ours), full(theirs), name, 1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_optimizers_in_the_backward_of_two_programs(stage: int) -> None:
    run_ranks(2, _steps_in_backward, stage)
