"""Peak memory in closed form is what the walk over a traced program finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.logs import heard
from zerofx.config import ZeroConfig
from zerofx.cost.lines import NotAlikeError
from zerofx.cost.machine import DATACENTER_GPU
from zerofx.cost.memory import FP32_ADAM
from zerofx.cost.surface import B, S
from zerofx.frontend.planner import Planner


class Scores(nn.Module):
    """Attention by hand, whose scores are B·S², and a mask of S²."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril()
        scores = (x @ self.key(x).transpose(1, 2) + mask).softmax(-1)
        return (scores @ self.value(x))[:, :-1].flatten(0, 1).square().mean()


def planner(batch: int, length: int, **options: Any) -> Planner:
    def inputs(batch: int, length: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.zeros(batch, length, dtype=torch.int64),), {}

    config = ZeroConfig(inner="eager", min_shard_numel=0, dump="", **options)
    return Planner(Scores, inputs, config, DATACENTER_GPU, FP32_ADAM, 4, batch, length, whole=True)


def test_sizes_that_were_never_traced() -> None:
    stages = (1, 3)
    asked = planner(2, 16, quantize_weights="int8", quantize_exact=("slip",))
    with heard("zerofx.frontend.layouts") as said:
        formulas = asked.closed_forms(asked.plan(stages))
    assert len(said) == 1 and "'slip'" in said[0]  # once, and not for each length
    for formula in formulas.values():
        assert formula.free_symbols == {B, S}
        assert formula.has(S**2)
    for batch, length in ((3, 17), (9, 64), (2, 301)):
        plans = dataclasses.replace(asked, batch=batch, length=length).plan(stages).stages
        for stage in stages:
            walked = plans[stage].forecast.peak(batch).total
            formula = formulas[stage].subs({B: batch, S: length})
            assert round(float(formula)) == walked


class Other(nn.Module):
    """Computes something else for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.relu() if x.shape[1] > 16 else x).square().mean()


def test_a_program_that_depends_on_the_length_has_no_formula() -> None:
    def inputs(batch: int, length: int) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        return (torch.zeros(batch, length, 8),), {}

    config = ZeroConfig(inner="eager", min_shard_numel=0, dump="")
    asked = Planner(Other, inputs, config, DATACENTER_GPU, FP32_ADAM, 4, 2, 16, whole=True)
    with pytest.raises(NotAlikeError):
        asked.closed_forms(asked.plan((3,)))
