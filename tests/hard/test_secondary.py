"""Secondary shards (hpZ): backward stays inside the node, and never sees a value that is old."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerofx
from tests.device import DEVICE
from tests.hard.pair import EAGER, draw, full
from tests.ranks import run_ranks
from zerofx.errors import UnsupportedError
from zerofx.sharding.shard import session_of

WIDTH = 6
NODES = {**EAGER, "ranks_per_node": 2}
STRICT = {**NODES, "bucket_bytes": 200, "memory_budget": 0}
Scenario = Callable[[nn.Module, Any], list[Tensor]]


class Odd(nn.Module):
    """Rows that do not divide by four, a parameter of fewer rows than ranks, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.middle = nn.Sequential(nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 9))
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


def _loss(run: Any, seed: int = 0) -> Tensor:
    return run(draw(4, WIDTH, seed=seed)).square().mean()


def _gradients(model: nn.Module) -> list[Tensor]:
    return [full(param.grad) for param in model.parameters() if param.grad is not None]


def _trained(model: nn.Module, run: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(3):
        _loss(run, number).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param) for param in model.parameters()]


def _two_forwards(model: nn.Module, run: Any) -> list[Tensor]:
    first = _loss(run, 1)
    with torch.no_grad():
        model.get_parameter("middle.0.weight").mul_(2.0)
    second = _loss(run, 2)
    second.backward()
    with pytest.raises(UnsupportedError, match=r"middle\.0\.weight"):
        first.backward()
    return _gradients(model)


def _edited(model: nn.Module, run: Any) -> list[Tensor]:
    loss = _loss(run)
    with torch.no_grad():
        model.get_parameter("middle.0.weight").mul_(2.0)
    with pytest.raises(UnsupportedError, match="between a forward and its backward"):
        loss.backward()
    _loss(run).backward()
    return _gradients(model)


def _stepped(model: nn.Module, run: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    _loss(run).backward()
    late = _loss(run)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(UnsupportedError, match="between a forward and its backward"):
        late.backward()
    _loss(run).backward()
    return _gradients(model)


def _loaded(model: nn.Module, run: Any) -> list[Tensor]:
    for assign in (False, True):
        loss = _loss(run)
        state = {"first.weight": model.state_dict()["first.weight"] * 0.5}
        model.load_state_dict(state, strict=False, assign=assign)
        if not assign:
            loss.backward()  # reads no value of it
        _loss(run).backward()
    return _gradients(model)


def _evaluated(model: nn.Module, run: Any) -> list[Tensor]:
    loss = _loss(run)
    with torch.no_grad():
        values = [_loss(run, 1)]
        model.get_parameter("middle.0.weight").data.mul_(2.0)
        values.append(_loss(run, 1))
    zerofx.refresh(model)
    with pytest.raises(UnsupportedError, match="between a forward and its backward"):
        loss.backward()
    model.get_parameter("middle.0.weight").data.mul_(2.0)
    _loss(run).backward()
    return [*values, *_gradients(model)]


def _by_hand(model: nn.Module, run: Any) -> list[Tensor]:
    """Steps through `.data`, which nothing sees: each forward renews what its backward finds."""
    for number in range(3):
        _loss(run, number).backward()
        for param in model.parameters():
            if param.grad is not None:
                param.data.sub_(param.grad, alpha=0.5)
        model.zero_grad()
    return [full(param) for param in model.parameters()]


def _failed(model: nn.Module, run: Any) -> list[Tensor]:
    """A step that raises between forward and backward, and one whose backward raises."""

    def fail(grad: Tensor) -> None:
        raise KeyError

    _loss(run)
    with torch.no_grad():
        model.get_parameter("first.weight").mul_(2.0)
    x = draw(4, WIDTH).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(KeyError):
        run(x).square().mean().backward()
    model.zero_grad()
    model.get_parameter("first.weight").data.mul_(2.0)
    _loss(run).backward()
    return _gradients(model)


def _accumulated(model: nn.Module, run: Any) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.no_grad():
        _loss(run)
    for step in range(2):
        with zerofx.no_sync(model):
            _loss(run, step).backward()
            with torch.no_grad():
                model.get_parameter("first.weight").mul_(2.0)
            _loss(run, step).backward()
        _loss(run, 5 + step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [full(param) for param in model.parameters()]


def _options(model: nn.Module) -> dict[str, Any]:
    session = session_of(model)
    assert session is not None
    return {"config": session.config}


def _copied(model: nn.Module, run: Any) -> list[Tensor]:
    _loss(run).backward()
    other = copy.deepcopy(model)
    again = torch.compile(other, backend="zero3", options=_options(model))
    with torch.no_grad():
        other.get_parameter("first.weight").mul_(2.0)
    _loss(again).backward()
    return _gradients(other)


SCENARIOS = (
    _trained,
    _two_forwards,
    _edited,
    _stepped,
    _loaded,
    _evaluated,
    _by_hand,
    _failed,
    _accumulated,
    _copied,
)


def _results(options: dict[str, Any], scenarios: tuple[Scenario, ...]) -> list[list[Tensor]]:
    """What the scenarios find one after another, so that each leaves its copies to the next."""
    model = Odd().to(DEVICE)
    zerofx.shard(model, zerofx.ZeroConfig(**options))
    run = torch.compile(model, backend="zero3")
    results = []
    for scenario in scenarios:
        results.append(scenario(model, run))
        model.zero_grad()
    torch.compiler.reset()
    return results


def differences(
    options: dict[str, Any], scenarios: tuple[Scenario, ...], secondary: bool | str = True
) -> list[str]:
    want, got = (
        _results({**options, "secondary_shards": each}, scenarios) for each in (False, secondary)
    )
    return [
        scenario.__name__
        for scenario, one, other in zip(scenarios, want, got, strict=True)
        if not all(map(torch.equal, one, other))
    ]


def test_no_value_differs_from_those_of_all_ranks() -> None:
    assert run_ranks(4, differences, STRICT, SCENARIOS, timeout=220) == [[]] * 4


def test_nor_does_it_in_mixed_precision_with_what_forward_keeps() -> None:
    options = {**NODES, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    scenarios = (_accumulated, _edited)
    assert run_ranks(4, differences, options, scenarios, timeout=220) == [[]] * 4


def test_nor_does_it_from_those_that_forward_decoded() -> None:
    options = {**NODES, "quantize_weights": "int8x32", "quantize_exact": ()}
    scenarios = (_trained, _accumulated)
    assert run_ranks(4, differences, options, scenarios, timeout=220) == [[]] * 4


def test_nor_does_it_from_those_that_forward_received() -> None:
    """Codes are kept and gathered as they came; every weight is wide enough for some."""
    options = {**STRICT, "quantize_weights": "int4x32", "quantize_exact": ()}
    scenarios = (_stepped, _loaded, _evaluated, _accumulated)
    found = run_ranks(4, differences, options, scenarios, "codes", timeout=220)
    assert found == [[]] * 4
