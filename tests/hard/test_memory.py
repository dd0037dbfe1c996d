"""What is held at once, measured from outside at every collective (DESIGN §4)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.hard.live import count_of_size
from tests.hard.pair import EAGER, draw
from tests.hard.wire import watched
from tests.ranks import run_ranks
from zerofx.ir.spec import Region
from zerofx.ir.verify import peak_full_bytes

DEPTH, WIDTH = 6, 37
FULL = WIDTH * WIDTH * 4
PADDED = (WIDTH + 1) * WIDTH * 4
"""A weight gathered from two ranks has one row of padding; no other tensor has either size."""


def _deep() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


def _programs() -> dict[Region, Any]:
    """Programs of every capture that is alive."""
    from zerofx.frontend.capture import Capture

    captures = [each for each in gc.get_objects() if type(each) is Capture]
    return {region: p for capture in captures for region, p in capture.programs.items()}


def _weights_alive(stage: int) -> tuple[int, int, float]:
    """Most storages of a weight's size at a collective, in forward and backward; planned peak."""
    run = torch.compile(_deep(), backend=f"zero{stage}", options=EAGER)
    optimizer: list[int] = []

    def step() -> tuple[list[int], list[int]]:
        counts: tuple[list[int], list[int]] = ([0], [0])
        with watched(lambda: counts[0].append(count_of_size((FULL, PADDED)))):
            loss = run(draw(2, WIDTH)).square().mean()
        with watched(lambda: counts[1].append(count_of_size((FULL, PADDED)))):
            loss.backward()
        return counts

    step()
    forward, backward = step()
    planned = max(peak_full_bytes(program) for program in _programs().values())
    del optimizer
    return max(forward), max(backward), planned / PADDED


def test_stage_3_holds_no_more_full_weights_than_planned() -> None:
    for forward, backward, planned in run_ranks(2, _weights_alive, 3):
        assert planned <= 2, "the plan itself holds many"
        # In backward one full gradient, of the weight's own size, is alive besides.
        assert forward <= planned, (forward, planned)
        assert backward <= planned + 1, (backward, planned)


def _gradients_alive(stage: int) -> int:
    """Most full gradients alive at a collective of a backward."""
    run = torch.compile(_deep(), backend=f"zero{stage}", options=EAGER)
    run(draw(2, WIDTH)).square().mean().backward()
    loss = run(draw(2, WIDTH)).square().mean()
    counts = [0]
    # Resident copies have the padded size, gradients the true one.
    with watched(lambda: counts.append(count_of_size((FULL,)))):
        loss.backward()
    return max(counts)


def test_stage_2_never_holds_all_full_gradients() -> None:
    assert max(run_ranks(2, _gradients_alive, 2)) <= 2
    assert min(run_ranks(2, _gradients_alive, 1)) == DEPTH, "the measure sees nothing"


class Big(nn.Module):
    """Its input is large, and dead as soon as the first layer read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 1, bias=False), nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x).mean()).view(1, 1)).sum()


def _input_dies(stage: int) -> list[bool]:
    """Whether the input is alive at each collective of an inference forward."""
    run = torch.compile(Big(), backend=f"zero{stage}", options=EAGER)
    with torch.no_grad():
        run(torch.ones(4, 64))
        x = torch.ones(100_000, 64)
        seen = weakref.ref(x)
        alive: list[bool] = []
        with watched(lambda: alive.append(seen() is not None)):
            boxed = [x]
            del x
            run(boxed.pop())
    return alive


def _dies_with_its_user(stage: int) -> tuple[bool, bool]:
    from zerofx.runtime.handles import live_domains

    before = len(live_domains())
    model = _deep()
    run = torch.compile(model, backend=f"zero{stage}", options=EAGER)
    late = run(draw(2, WIDTH)).square().mean()
    weight = model.get_parameter("0.weight")
    del model, run
    gc.collect()
    late.backward()
    reduced = weight.grad is not None
    del late, weight
    gc.collect()
    return reduced, len(live_domains()) == before


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_dies_with_its_user_and_a_late_backward_still_works(stage: int) -> None:
    assert run_ranks(2, _dies_with_its_user, stage) == [(True, True)] * 2
