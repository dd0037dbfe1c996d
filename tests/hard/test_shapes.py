"""New shapes: recompiles, dynamic shapes, segments full of symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.hard.pair import EAGER, INDUCTOR, Pair, draw
from tests.passes.test_sizes import small
from tests.ranks import run_ranks


class Attention(nn.Module):
    """Reshapes whose sizes are products and quotients of the batch's."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        flat = mixed.transpose(1, 2).reshape(batch * length, width)
        pairs = torch.cat([flat, flat]).view(2 * batch * length, width)
        return self.out(pairs).square().mean()


_SHAPES = [(4, 6), (4, 6), (3, 6), (3, 5), (5, 9), (1, 7), (4, 6)]


def _many_shapes(stage: int, inner: str, **compile_options: Any) -> None:
    options, rtol = (EAGER, 1e-6) if inner == "eager" else (INDUCTOR, 1e-5)
    pair = Pair(Attention(), stage, options, rtol=rtol, **compile_options)

    def loss(run: nn.Module, number: int) -> Tensor:
        return run(draw(*_SHAPES[number], 8, seed=number))

    pair.train(loss, len(_SHAPES) if inner == "eager" else 4)


@pytest.mark.parametrize(("stage", "dynamic"), [(0, None), (1, True), (3, None)])
def test_batch_sizes_and_lengths(stage: int, dynamic: bool | None) -> None:
    run_ranks(2, _many_shapes, stage, "eager", dynamic=dynamic)


@pytest.mark.parametrize(("stage", "dynamic"), [(3, None), (1, True)])
def test_batch_sizes_and_lengths_through_inductor(stage: int, dynamic: bool | None) -> None:
    run_ranks(2, _many_shapes, stage, "inductor", dynamic=dynamic, timeout=220)


def _ranks_of_their_own(stage: int) -> None:
    """Each rank has its own sequence lengths, so that one recompiles alone."""
    pair = Pair(Attention(), stage, rtol=1e-6)

    def loss(run: nn.Module, number: int) -> Tensor:
        length = 6 + 2 * (number == 1 + dist.get_rank()) + number * dist.get_rank()
        return run(draw(4, length, 8, seed=number))

    pair.train(loss, 4)


@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_recompiles_alone(stage: int) -> None:
    run_ranks(2, _ranks_of_their_own, stage)


def _one_sample(stage: int, inner: str) -> None:
    """The last batch has one sample on a rank, of which torch makes another graph."""
    if inner == "eager":
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), layer, nn.Linear(8, 1))
        pair, sample = Pair(net, stage, EAGER, rtol=1e-6), (5, 8)
    else:
        pair, sample = Pair(small(), stage, INDUCTOR, rtol=1e-5), (4,)

    def loss(run: nn.Module, number: int) -> Tensor:
        return run(draw(3 if number == 0 else 1 + dist.get_rank(), *sample)).square().mean()

    pair.train(loss, 2)


@pytest.mark.parametrize(("stage", "inner"), [(3, "eager"), (3, "inductor"), (1, "eager")])
def test_one_rank_has_one_sample(stage: int, inner: str) -> None:
    run_ranks(2, _one_sample, stage, inner, timeout=220)


class _Paired(nn.Module):
    """Two inputs whose sizes are one: of their symbols in Dynamo one replaces the other.

    Which one, a hash of their names says.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 13), nn.Linear(13, 16)
        self.mix = nn.Linear(13, 13)

    def forward(self, idx: Tensor, x: Tensor) -> Tensor:
        mixed = self.mix(self.embed(idx) + x[..., None].to(self.mix.weight.dtype))
        return self.head(mixed).square().mean()


class _PairedTheOtherWay(_Paired):
    def forward(self, i: Tensor, x: Tensor) -> Tensor:
        return super().forward(i, x)


def _paired(build: type[nn.Module]) -> None:
    pair = Pair(build(), 3, {**INDUCTOR, "bucket_bytes": 1000}, rtol=1e-5)

    def loss(run: nn.Module, number: int) -> Tensor:
        x = draw(3 + (number and dist.get_rank()), 3, seed=number)
        return run(torch.zeros_like(x, dtype=torch.long), x)

    pair.train(loss, 2)


@pytest.mark.parametrize("build", [_Paired, _PairedTheOtherWay])
def test_sizes_that_inputs_share(build: type[nn.Module]) -> None:
    run_ranks(2, _paired, build, timeout=220)


class Masked(nn.Module):
    """Reshapes rows of which only values tell how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.up(x)[x.sum(1) > 0].reshape(-1)
        return self.down(flat.tanh().view(-1, 8)).square().sum()


def _sizes_from_values(inner: str) -> None:
    options, rtol = (EAGER, 0.0) if inner == "eager" else (INDUCTOR, 1e-6)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        pair = Pair(Masked(), 3, options, rtol=rtol, fullgraph=True)
        pair.train(lambda run, number: run(draw(9, 4, seed=number)), 3)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
def test_sizes_that_depend_on_values(inner: str) -> None:
    run_ranks(2, _sizes_from_values, inner, timeout=120)
