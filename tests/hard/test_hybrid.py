"""Hybrid sharding: split inside a group, repeat across groups (a 2-D mesh)."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.hard.pair import EAGER, Pair, draw
from tests.hard.test_accumulation import Sides
from tests.hard.wire import watched
from tests.models import batch, make
from tests.ranks import run_ranks
from zerofx.cost.comm import algorithms_for
from zerofx.runtime.comm import node_size_of


def _options(how: str) -> dict[str, Any]:
    if how == "replicate":
        return {**EAGER, "replicate": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return {**EAGER, "mesh": mesh}


def hybrid(stage: int, how: str) -> tuple[int, int, int, int]:
    pair = Pair(make("gpt"), stage, _options(how), rtol=1e-6)

    def loss(run: Any, number: int) -> Any:
        return run(*batch("gpt", dist.get_rank(), number))

    pair.train(loss, 3)
    value = loss(pair.run, 9)
    with watched() as wire:
        value.backward()
    sent, repeated = wire.sent_to[dist.get_rank() ^ 1], wire.sent_to[dist.get_rank() ^ 2]
    params = list(pair.model.parameters())
    whole = sum(param.nbytes for param in params)
    resident = sum(param._local_tensor.nbytes for param in params)  # pyright: ignore
    return sent, repeated, whole, resident


@pytest.mark.parametrize(("stage", "how"), [(1, "replicate"), (2, "mesh"), (3, "replicate")])
def test_four_ranks_in_two_groups(stage: int, how: str) -> None:
    by_rank = run_ranks(4, hybrid, stage, how, timeout=220)
    for sent, repeated, whole, resident in by_rank:
        # Shards are halves; means of shards cross between groups of two, nothing else does.
        assert 0.45 * whole < resident < 0.55 * whole
        assert repeated == resident
        gathers = whole if stage == 3 else 0
        assert sent < (whole + gathers) * 0.55


def _accumulated(stage: int, how: str) -> list[list[int]]:
    """Bytes between groups in each micro-batch of two steps; the last one leaves a head out."""
    options = {**EAGER, "min_shard_numel": 6, "replicate": 2, "accumulate": 3}
    if how == "no_sync":
        del options["accumulate"]
    pair, counts = Pair(Sides(), stage, options, rtol=1e-6), []
    with torch.no_grad():
        pair.run(draw(4, 7), "left right")
    for step in range(2):
        counts.append([])
        for index, sides in enumerate(("left right", "left right", "left")):

            def loss(run: Any, number: int, sides: str = sides) -> Any:
                return run(draw(4, 7, seed=number), sides)

            held = how == "no_sync" and index < 2
            context = zerofx.no_sync(pair.model) if held else contextlib.nullcontext()
            with context, watched() as wire:
                pair.backward(loss, 10 * step + index)
            counts[-1].append(wire.sent_to[dist.get_rank() ^ 2])
        pair.step()
    return counts


@pytest.mark.parametrize(("stage", "how"), [(2, "accumulate"), (3, "no_sync")])
def test_groups_share_gradients_once_a_step(stage: int, how: str) -> None:
    for counts in run_ranks(4, _accumulated, stage, how, timeout=220):
        for first, second, last in counts:
            assert (first, second) == (0, 0) and last > 0


class Scored(nn.Module):
    """Its head has few rows, which ranks of a group cannot share evenly."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(7, width), nn.Linear(width, rows, bias=False)

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.body(x))).square().mean()


def _few_rows(stage: int, width: int, rows: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    rtol = 1e-2 if options else 1e-6
    pair = Pair(Scored(width, rows), stage, {**EAGER, "replicate": 2, **options}, rtol=rtol)
    pair.train(lambda run, number: run(draw(4, 7, seed=number + 100 * dist.get_rank())))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("width", "rows", "options"),
    [(1024, 1, {}), (98304, 3, {"reduce_dtype": torch.bfloat16, "bucket_bytes": 0})],
    ids=["empty", "packed-on-one"],
)
def test_ranks_with_more_and_fewer_rows_share_means_alike(
    stage: int, width: int, rows: int, options: dict[str, Any]
) -> None:
    run_ranks(4, _few_rows, stage, width, rows, options, timeout=100)


def test_groups_that_span_nodes_gather_in_two_hops() -> None:
    group = range(4, 8)
    assert node_size_of(group, 2) == 2
    assert algorithms_for("gloo", "cpu", 4, node_size_of(group, 2)).all_gather == "two_hop"
