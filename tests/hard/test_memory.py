"""What is held at once, measured from outside at every collective."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from tests.hard.live import count_of_size
from tests.hard.pair import EAGER, draw
from tests.hard.wire import watched
from tests.ranks import run_ranks
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes import Editor, Pass, Program, Region

DEPTH, WIDTH = 6, 37
FULL = WIDTH * WIDTH * 4
PADDED = (WIDTH + 1) * WIDTH * 4
"""A weight gathered from two ranks has one row of padding; no other tensor has either size."""


def _deep() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


_planned: list[int] = []
"""Full bytes at once, of every program that `Look` saw."""

_seen: list[weakref.ref[Program]] = []
"""The programs themselves."""


@dataclasses.dataclass(frozen=True)
class Look(Pass):
    """Writes down what finished programs are going to hold."""

    name: ClassVar[str] = "look"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD, Region.BACKWARD))

    def plan(self, program: Program) -> None:
        _planned.append(peak_full_bytes(program))
        _seen.append(weakref.ref(program))

    def apply(self, edit: Editor, plan: None) -> None:
        pass


def _weights_alive(stage: int) -> tuple[int, int, float]:
    """Most storages of a weight's size at a collective, in forward and backward; planned peak."""
    _planned.clear()
    _seen.clear()
    options = {**EAGER, "passes": [Look()]}
    run = torch.compile(_deep(), backend=f"zero{stage}", options=options)

    def step() -> tuple[list[int], list[int]]:
        counts: tuple[list[int], list[int]] = ([0], [0])
        with watched(lambda: counts[0].append(count_of_size((FULL, PADDED)))):
            loss = run(draw(2, WIDTH)).square().mean()
        with watched(lambda: counts[1].append(count_of_size((FULL, PADDED)))):
            loss.backward()
        return counts

    step()
    forward, backward = step()
    assert len(_planned) == 2
    gc.collect()
    assert not [ref for ref in _seen if ref()], "what runs keeps the nodes it was made from"
    return max(forward), max(backward), max(_planned) / PADDED


def test_stage_3_holds_no_more_full_weights_than_planned() -> None:
    for forward, backward, planned in run_ranks(2, _weights_alive, 3):
        assert planned <= 2, "the plan itself holds many"
        # In backward two full gradients, of the weight's own size, are alive besides: a reduction
        # starts before the one before it is waited for.
        assert 1 <= forward <= planned, (forward, planned)
        assert backward <= planned + 2, (backward, planned)


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


class Bulge(nn.Module):
    """Its first activation is large, and dead as soon as the second layer read it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 61, bias=False), nn.Linear(61, 1, bias=False)
        self.third, self.fourth = nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x)).mean().view(1, 1)))


def _bulges_alive() -> list[int]:
    """Number of large activations alive at each collective of an inference forward."""
    rows = 1009
    in_place = {**EAGER, "disable": ("fuse_unshards", "schedule")}
    run = torch.compile(Bulge(), backend="zero3", options=in_place)
    counts: list[int] = []
    with torch.no_grad():
        run(torch.ones(rows, 1))
        with watched(lambda: counts.append(count_of_size((rows * 61 * 4,)))):
            run(torch.ones(rows, 1))
    return counts


def test_the_executor_drops_values_after_their_last_reader() -> None:
    # Rank 0 owns the one row of `second` and `fourth`; it sends once per weight, at least.
    counts = run_ranks(2, _bulges_alive)[0]
    assert max(counts) == 1 and counts[-1] == 0, counts


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
