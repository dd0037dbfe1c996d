"""The models: their sizes, and that they and their data are the same on every rank."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import plan
from benchmarks.compare.zoo import MODELS, batches, build

SIZES = {"gpt": 27.3, "tiny": 0.55, "llama": 19.7, "t5": 22.8, "cnn": 20.7, "large": 93.4}


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    # Where nothing is computed and nothing initialized: shapes and gradients are what counts.
    with torch.device("meta"):
        model = build(name)
    size = sum(param.numel() for param in model.parameters()) / 1e6
    assert size == pytest.approx(SIZES[name], rel=0.01)
    inside = {id(param) for block in model.blocks() for param in block.parameters()}
    assert inside and inside < {id(param) for param in model.parameters()}
    model(*(part.to("meta") for part in batches(model, 0, 1)[0])).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_seeds() -> None:
    one, two = build("tiny"), build("tiny")
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    (first, second), other = batches(one, 0, 2), batches(one, 1, 1)[0]
    assert torch.equal(first[0], batches(two, 0, 1)[0][0])
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], other[0])


def test_cases_of_the_plan_are_looked_at_before_the_machine() -> None:
    for text in plan.CASES:
        assert plan._known(text) == text
    for wrong in ("foo:1", "gpt", "gpt:4", "gpt:x", "gpt:1:foo", "gpt:1:int8", "gpt:1:nn"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no case; models: gpt"):
            plan._known(wrong)
