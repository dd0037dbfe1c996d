"""Splitting by rows costs next to nothing on the shapes of a real model."""

from __future__ import annotations

import math

import pytest
import torch

from zerofx.ir.spec import Layout, ParamSpec

VOCABULARY, HIDDEN, LAYERS, INTERMEDIATE = 49152, 576, 30, 1536
KV_WIDTH = HIDDEN // 9 * 3


def _smollm2() -> dict[str, tuple[int, ...]]:
    """Parameters of SmolLM2-135M; the head is tied to the embedding."""
    block = {
        "q": (HIDDEN, HIDDEN),
        "k": (KV_WIDTH, HIDDEN),
        "v": (KV_WIDTH, HIDDEN),
        "o": (HIDDEN, HIDDEN),
        "gate": (INTERMEDIATE, HIDDEN),
        "up": (INTERMEDIATE, HIDDEN),
        "down": (HIDDEN, INTERMEDIATE),
        "norm1": (HIDDEN,),
        "norm2": (HIDDEN,),
    }
    shapes = {f"{layer}.{name}": s for layer in range(LAYERS) for name, s in block.items()}
    return {"embedding": (VOCABULARY, HIDDEN), **shapes, "norm": (HIDDEN,)}


def _padding(num_ranks: int) -> float:
    layout = Layout(1, num_ranks, 1, resident=False)
    specs = [
        ParamSpec(name, index, torch.Size(shape), torch.float32, True, layout)
        for index, (name, shape) in enumerate(_smollm2().items())
    ]
    return sum(spec.padded_numel for spec in specs) / sum(spec.numel for spec in specs) - 1


def test_the_shapes_are_those_of_the_model() -> None:
    assert sum(map(math.prod, _smollm2().values())) == 134_515_008


@pytest.mark.parametrize("num_ranks", [*range(1, 25), 27, 28, 32, 36, 48, 64])
def test_padding_is_at_most_two_percent(num_ranks: int) -> None:
    assert _padding(num_ranks) <= 0.02


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16, 32, 64])
def test_powers_of_two_cost_nothing(num_ranks: int) -> None:
    assert _padding(num_ranks) == 0


def test_no_number_of_ranks_up_to_64_costs_more_than_six_percent() -> None:
    """Rows cannot be split: 192 rows on 63 ranks are 252. `fully_shard` pads the same."""
    assert max(map(_padding, range(1, 65))) <= 0.06
