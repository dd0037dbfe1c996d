"""A quantized reduction is the mean over all ranks, whatever the nodes; a gather gathers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.program_builder import layout_of, specs_of
from zerofx.ir.kernels import reduce_kernels, unshard_kernels
from zerofx.ir.parcels import Codec
from zerofx.ir.spec import ParamSpec
from zerofx.sim.quantized import reduce_quantized, unshard_quantized

NODES = [(1, 4), (2, 2), (4, 1), (1, 1), (2, 3), (3, 2), (4, 8)]
"""Nodes, and ranks on each."""

INT8, INT4 = Codec("int8", 32), Codec("int4", 32)


def params_for(world: int) -> list[ParamSpec]:
    """Rows that divide evenly, that do not, that are fewer than ranks; a block and more of them."""
    shapes = {"even": (world, 40), "odd": (2 * world + 1, 3), "few": (1, 5), "row": (world,)}
    return list(specs_of(shapes, layout_of(world), dtype=torch.float32).values())


def owned(values: Sequence[Tensor], params: Sequence[ParamSpec], rank: int) -> list[Tensor]:
    """Rank's part of full values, as a flat padded chunk."""
    out: list[Tensor] = []
    for value, spec in zip(values, params, strict=True):
        part = value.view(spec.shape)[slice(*spec.rows(rank))].reshape(-1)
        size = spec.padded_numel // spec.layout.num_shards
        out.append(torch.nn.functional.pad(part, (0, size - part.numel())))
    return out


def by_chunk(spec: ParamSpec, factor: float) -> Tensor:
    """A gradient whose elements say for which rank they are: `factor` × (1 + its number)."""
    row = torch.arange(spec.shape[0]) // spec.chunk_rows + 1
    return (factor * row).view(-1, 1).expand(-1, spec.row_numel).reshape(-1).float()


@pytest.mark.parametrize("codec", [INT8, INT4, Codec("fp8", 64)], ids=lambda codec: codec.name)
@pytest.mark.parametrize(("nodes", "local"), NODES)
def test_mean_over_all_ranks_of_constants(nodes: int, local: int, codec: Codec) -> None:
    world = nodes * local
    params = params_for(world)
    grads = [[by_chunk(spec, rank + 1) for spec in params] for rank in range(world)]
    kernels = reduce_kernels(params, codec, codec, nodes)
    wanted = [by_chunk(spec, (world + 1) / 2) for spec in params]
    for rank, found in enumerate(reduce_quantized(kernels, grads)):
        for got, want in zip(found, owned(wanted, params, rank), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("nodes", "local"), NODES)
def test_two_hops_are_near_the_mean_of_random_gradients(nodes: int, local: int) -> None:
    world, generator = nodes * local, torch.Generator().manual_seed(1)
    params = params_for(world)
    grads = [[torch.randn(p.numel, generator=generator) for p in params] for _ in range(world)]
    kernels = reduce_kernels(params, INT8, INT8, nodes)
    means = [torch.stack(list(values)).mean(0) for values in zip(*grads, strict=True)]
    found = torch.cat([torch.cat(one) for one in reduce_quantized(kernels, grads)])
    wanted = torch.cat([torch.cat(owned(means, params, rank)) for rank in range(world)])
    assert float((found - wanted).norm() / wanted.norm()) < 0.012


@pytest.mark.parametrize("second", [INT4, INT8], ids=lambda codec: codec.name)
def test_the_second_hop_may_have_another_codec(second: Codec) -> None:
    params = params_for(4)
    grads = [[torch.full((p.numel,), rank + 1.0) for p in params] for rank in range(4)]
    for rank, one in enumerate(reduce_quantized(reduce_kernels(params, INT4, second, 2), grads)):
        wanted = owned([torch.full((p.numel,), 2.5) for p in params], params, rank)
        for got, want in zip(one, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("nodes", "local"), [(1, 4), (2, 2), (4, 1)])
def test_one_rank_with_an_infinity_is_seen_by_the_owner(nodes: int, local: int) -> None:
    params = params_for(4)
    grads = [[torch.ones(p.numel) for p in params] for _ in range(4)]
    grads[2][0][45] = torch.inf  # the second row of `even`, which rank 1 owns
    found = reduce_quantized(reduce_kernels(params, INT8, INT8, nodes), grads)
    assert [bool(torch.cat(one).isnan().any()) for one in found] == [False, True, False, False]
    assert found[1][0].isnan().nonzero().flatten().tolist() == list(range(32))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_all_ranks_gather_the_same_full_values(world: int) -> None:
    params = params_for(world)
    values = [by_chunk(spec, 1.0) for spec in params]
    kernels = unshard_kernels(params, INT4)
    results = unshard_quantized(kernels, [owned(values, params, rank) for rank in range(world)])
    for found in results:
        for got, want, spec in zip(found, values, params, strict=True):
            torch.testing.assert_close(got[: spec.numel], want, rtol=1e-5, atol=0)
            assert (got[spec.numel :] == 0).all()


def test_ranks_and_steps_round_differently_at_random() -> None:
    params = params_for(2)
    codec = Codec("int4", 32, rounding="stochastic")
    shards = [owned([torch.linspace(0, 1, p.numel) for p in params], params, r) for r in (0, 1)]
    kernels = unshard_kernels(params, codec)
    first, again, other = (
        torch.cat(unshard_quantized(kernels, shards, seed)[0]) for seed in (1, 1, 7)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
