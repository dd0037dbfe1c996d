"""Ranks that issue other collectives, or the same in another order, stop with a diff."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.fingerprint.chain import Chain, SwapGathers, fit, fit_unlike, messages_of_all


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


@pytest.mark.parametrize("stage", [0, 3])
def test_collectives_without_tags_are_compared_once_a_step(stage: int) -> None:
    """Equal sizes: gloo would pair the wrong layers and train on."""
    orders = [(0, 1, 2), (0, 2, 1)]
    for message in messages_of_all(2, fit_unlike, stage, orders, True):
        assert "different collectives" in message and "layers.1.weight" in message
