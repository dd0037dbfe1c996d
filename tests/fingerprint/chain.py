"""A model whose layers a rank may reorder or skip, and a loop that trains it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ranks import RanksFailed, run_ranks
from zerofx.cost.comm import Algorithms
from zerofx.ir.edit import Editor
from zerofx.ir.ops import UNSHARD_START
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.passes.base import Pass

WIDTH = 8
OPTIONS = {"inner": "eager", "min_shard_numel": 0, "hang_timeout": 1.0}


class Chain(nn.Module):
    """Equal layers, so that their gathers could be mistaken for each other."""

    def __init__(self, order: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.order = tuple(order)

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return F.mse_loss(x, torch.ones_like(x))


@dataclasses.dataclass(frozen=True)
class SwapGathers(Pass):
    """Gather the second parameter of a forward before the first one."""

    name: ClassVar[str] = "swap_gathers"
    regions: ClassVar[frozenset[Region]] = frozenset((Region.FORWARD,))

    def plan(self, program: Program) -> list[Any]:
        first, second = program.calls(UNSHARD_START)[:2]
        return [first, second, next(iter(second.users))]

    def apply(self, edit: Editor, plan: list[Any]) -> None:
        first, start, wait = plan
        edit.move_before(start, first)
        edit.move_before(wait, first)


def native_collectives() -> Any:
    """Let ranks use gloo's own collectives, whose messages carry no tag."""
    native = Algorithms("native", "native")
    return patch("zerofx.runtime.comm.algorithms_for", lambda *_: native)


def fit(
    model: nn.Module,
    stage: int,
    steps: int = 3,
    before_step: Callable[[int], None] = lambda step: None,
    rows: Callable[[int], int] = lambda step: 4,
    **options: Any,
) -> list[float]:
    """Train; returns the losses of this rank."""
    torch.manual_seed(0)
    compiled = torch.compile(model, backend=f"zero{stage}", options={**OPTIONS, **options})
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        before_step(step)
        loss = compiled(torch.randn(rows(step), WIDTH))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def fit_unlike(stage: int, orders: Sequence[Sequence[int]], native: bool = False) -> None:
    """Each rank runs its own order of layers, from the second step on."""
    rank = dist.get_rank()
    model = Chain()

    def change(step: int) -> None:
        if step == 1:
            model.order = tuple(orders[rank])

    if native:
        with native_collectives():
            fit(model, stage, 4, before_step=change)
    else:
        fit(model, stage, 4, before_step=change)


def messages_of_all(world_size: int, job: Callable[..., Any], *args: Any) -> list[str]:
    """Run a job that must end in a `DivergedError` on every rank; returns what they say."""
    start = time.monotonic()
    try:
        run_ranks(world_size, job, *args, timeout=60)
    except RanksFailed as failed:
        kinds = {rank: failure.kind for rank, failure in failed.failures.items()}
        assert kinds == dict.fromkeys(range(world_size), "DivergedError"), str(failed)
        assert time.monotonic() - start < 45, "a hang is a diff within seconds"
        return [failed.failures[rank].message for rank in range(world_size)]
    raise AssertionError("the ranks ran different programs, and trained on")
