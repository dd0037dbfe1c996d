"""Ranks that issue other collectives, or the same in another order, stop with a diff."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerofx
from tests.contract.loops import config
from tests.fingerprint.chain import Chain, SwapGathers, fit, fit_unlike, messages_of_all
from tests.ranks import RanksFailed, run_ranks
from zerofx.sharding.shard import session_of


def _fit_swapped() -> None:
    passes = (SwapGathers(),) if dist.get_rank() == 1 else ()
    fit(Chain(), 3, passes=passes)


@pytest.mark.parametrize("stage, orders", [(3, [(0, 1, 2), (0, 2)]), (2, [(0, 1, 2), (1, 0, 2)])])
def test_layers_skipped_or_in_another_order(stage: int, orders: list[tuple[int, ...]]) -> None:
    for message in messages_of_all(2, fit_unlike, stage, orders):
        assert "issue different collectives from number" in message
        assert "layers.1.weight" in message


def test_all_of_four_ranks_learn_of_it() -> None:
    orders = [(0, 1, 2), (0, 1, 2), (0, 2, 1), (0, 1, 2)]
    for message in messages_of_all(4, fit_unlike, 3, orders):
        assert "ranks" in message and "layers.1.weight" in message and "rank 2" in message


def test_a_pass_that_one_rank_alone_has_is_named() -> None:
    """Before it swaps anything; `tests/own_passes` has one that all ranks have and one obeys."""
    for message in messages_of_all(2, _fit_swapped):
        assert "rank 1: pass swap_gathers: SwapGathers()" in message


def _first_tags() -> list[int]:
    """Of two models of a kind, and of a copy of which rank 0 made another alone."""
    models: list[nn.Module] = [zerofx.shard(Chain(), config(3)) for _ in range(2)]
    if dist.get_rank() == 0:
        copy.deepcopy(models[0])
    models.append(copy.deepcopy(models[0]))
    sessions = [session for each in models if (session := session_of(each)) is not None]
    return [session.journal.record("all_gather", "layers.0.weight") for session in sessions]


def test_messages_of_models_do_not_meet() -> None:
    one, other = run_ranks(2, _first_tags)
    assert one == other and len(set(one)) == 3


@pytest.mark.parametrize("stage", [0, 3])
def test_collectives_without_tags_are_compared_once_a_step(stage: int) -> None:
    """Equal sizes: gloo would pair the wrong layers and train on."""
    orders = [(0, 1, 2), (0, 2, 1)]
    for message in messages_of_all(2, fit_unlike, stage, orders, True):
        assert "different collectives" in message and "layers.1.weight" in message


class _Branch(nn.Module):
    """Each rank goes its own way, through layers of other sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.narrow = nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width))
        self.goes_wide = dist.get_rank() == 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return (self.wide if self.goes_wide else self.narrow)(x).square().mean()


def _branches(stage: int, width: int) -> None:
    model = _Branch(width)
    options = {"inner": "eager", "hang_timeout": 1.0}
    torch.compile(model, backend=f"zero{stage}", options=options)(torch.randn(4, 6)).backward()


@pytest.mark.parametrize(
    ("stage", "width"),
    [(0, 300), (2, 300), (3, 8), (3, 300)],  # of 8, parameters are replicated
)
def test_sizes_that_differ_end_no_process(stage: int, width: int) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(2, _branches, stage, width)
    for failure in failed.value.failures.values():
        assert failure.kind == "DivergedError", failure
        assert "narrow" in failure.message and "wide" in failure.message, failure.message
