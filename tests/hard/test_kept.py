"""Values kept from forward to backward: used once, never when out of date, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hard.pair import EAGER, draw, full
from tests.hard.wire import watched
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError
from zerofx.sharding.shard import session_of

WIDTH = 6
Scenario = Callable[[nn.Module, Any], list[Tensor]]


def _model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers)


def _loss(run: Any, seed: int = 0) -> Tensor:
    return run(draw(4, WIDTH, seed=seed)).square().mean()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [full(param.grad) for param in model.parameters()]


def _two_forwards(model: nn.Module, run: Any) -> list[Tensor]:
    first, second = _loss(run, 1), _loss(run, 2)
    second.backward()
    first.backward()
    return _gradients(model)


def _retained(model: nn.Module, run: Any) -> list[Tensor]:
    loss = _loss(run)
    loss.backward(retain_graph=True)
    loss.backward()
    return _gradients(model)


def _edited(model: nn.Module, run: Any) -> list[Tensor]:
    loss = _loss(run)
    with torch.no_grad():
        model.get_parameter("2.0.weight").mul_(2.0)
    with pytest.raises(UnsupportedError, match="between a forward and its backward"):
        loss.backward()
    _loss(run).backward()
    return _gradients(model)


def _stepped(model: nn.Module, run: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _loss(run).backward()
    late = _loss(run)  # keeps what the step changes
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="between a forward and its backward"):
        late.backward()
    _loss(run).backward()
    return _gradients(model)


def _abandoned(model: nn.Module, run: Any) -> list[Tensor]:
    """Before an edit, a forward that nobody differentiates leaves what it kept."""
    _loss(run)
    with torch.no_grad():
        model.get_parameter("2.0.weight").neg_()
    _loss(run).backward()
    return _gradients(model)


def _forward_alone(model: nn.Module, run: Any) -> list[Tensor]:
    values = [_loss(run).detach()]
    model.get_parameter("2.0.weight").data.mul_(2.0)  # seen, too
    values.append(_loss(run).detach())
    with torch.no_grad():
        values.append(_loss(run))
    return values


def _frozen_later(model: nn.Module, run: Any) -> list[Tensor]:
    model.get_parameter("2.0.weight").requires_grad_(False)
    _loss(run).backward()
    return [full(param.grad) for param in model.parameters() if param.grad is not None]


# Backwards that retain their graph are compiled as such.
SCENARIOS = (
    (_retained,),
    (_two_forwards, _edited, _stepped, _abandoned, _forward_alone, _frozen_later),
)


def _results(scenarios: tuple[Scenario, ...], budget: int | None) -> list[list[Tensor]]:
    """What they find one after another, so that each leaves to the next what it kept."""
    torch.compiler.reset()
    model, results = _model(), []
    options = {**EAGER, "memory_budget": budget, "bucket_bytes": 200}
    run = torch.compile(model, backend="zero3", options=options)
    for scenario in scenarios:
        results.append(scenario(model, run))
        model.zero_grad()
    return results


def _both_ways() -> list[str]:
    wrong = []
    for scenarios in SCENARIOS:
        first, *others = (_results(scenarios, budget) for budget in (None, 0, 10_000))
        for other in others:
            found = zip(scenarios, first, other, strict=True)
            wrong += [each.__name__ for each, a, b in found if not all(map(torch.equal, a, b))]
    return wrong


def test_keeping_changes_no_value() -> None:
    assert run_ranks(2, _both_ways, timeout=220) == [[], []]


def _messages(budget: int | None) -> tuple[int, int, int]:
    """Messages of a backward, bytes in use after it, and after a forward alone and a step."""
    model = _model()
    options = {**EAGER, "memory_budget": budget, "bucket_bytes": 200}
    run = torch.compile(model, backend="zero3", options=options)
    _loss(run).backward()
    loss = _loss(run)
    with watched() as wire:
        loss.backward()
    session = session_of(model)
    assert session is not None
    after = session.gathered.used_bytes()
    _loss(run)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return wire.count("isend"), after, session.gathered.used_bytes()


def test_kept_values_are_not_gathered_again_and_leave_no_memory_behind() -> None:
    strict, last, everything = (run_ranks(2, _messages, b)[0] for b in (0, None, 10_000))
    # Backward reads the weights of two layers (inputs need no gradient), and reduces three buckets.
    assert [strict, last, everything] == [(5, 0, 0), (4, 0, 0), (3, 0, 0)]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class _Broken(nn.Module):
    """Dynamo leaves loops with breaks alone: every layer is a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            torch._dynamo.graph_break()
        return x


def _several_graphs() -> list[tuple[int, int, list[Tensor]]]:
    """For each budget: bytes kept after a forward, in use after its backward, and gradients."""
    found = []
    for budget in (None, 2 * 4 * WIDTH * WIDTH, 10_000):
        torch.compiler.reset()
        model = _Broken()
        options: dict[str, Any] = {**EAGER, "memory_budget": budget}
        run = torch.compile(model, backend="zero3", options=options)
        loss = run(draw(4, WIDTH).requires_grad_()).square().mean()
        session = session_of(model)
        assert session is not None
        kept = session.gathered.used_bytes()
        loss.backward()
        found.append((kept, session.gathered.used_bytes(), _gradients(model)))
    return found


def test_the_graphs_of_a_forward_share_one_budget() -> None:
    last, two, everything = run_ranks(2, _several_graphs)[0]
    weight = 4 * WIDTH * WIDTH
    assert [last[:2], two[:2], everything[:2]] == [(weight, 0), (2 * weight, 0), (3 * weight, 0)]
    assert all(map(torch.equal, last[2] * 2, two[2] + everything[2]))
