"""Ranks whose batches are of different sizes, of one sample too, issue the same collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zerofx.config import Inner, ZeroConfig
from zerofx.frontend.rehearsal import rehearse_model
from zerofx.ir.facts import facts
from zerofx.ir.ops import STARTS


class Layer(nn.Module):
    """Of one sample, or one position, torch adds biases in other places than of several."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(16, 32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.value = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.layer(x + self.positions[: x.shape[1]])).square().mean()


class Images(nn.Module):
    """Normalised over batches, groups and channels."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU()),
            *(nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU()),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.scale * self.features(x)).mean((2, 3))).square().mean()


def small() -> nn.Module:
    """Products so small that Inductor writes those of one row as sums."""
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2), nn.Flatten(0))


def _collectives(build: Callable[[], nn.Module], shape: tuple[int, ...], inner: Inner) -> list[str]:
    rehearsal = rehearse_model(build, lambda: ((torch.zeros(shape),), {}), inner)
    config = ZeroConfig(stage=3, inner=inner, min_shard_numel=0, dump="")
    return [
        f"{program.region.value}: {start.target} of {', '.join(facts(start).members)}"
        for program in rehearsal.programs(config, 2)
        for start in program.calls(*STARTS)
    ]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (small, [(3, 4), (1, 4)]),
        (Layer, [(2, 9, 32), (1, 9, 32), (2, 1, 32), (1, 1, 32)]),
        (Images, [(4, 3, 8, 8), (1, 3, 8, 8), (2, 3, 4, 4)]),
    ],
    ids=["small", "layer", "images"],
)
def test_collectives_do_not_depend_on_sizes(
    build: Callable[[], nn.Module], shapes: list[tuple[int, ...]], inner: Inner
) -> None:
    first, *others = (_collectives(build, shape, inner) for shape in shapes)
    assert first
    for other in others:
        assert other == first
