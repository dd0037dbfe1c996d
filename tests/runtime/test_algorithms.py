"""Every way to gather and to reduce gives the same values, with the bytes that it promises."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import run_ranks
from zerofx.cost.comm import Algorithm, Algorithms
from zerofx.runtime.collectives import all_gather, reduce_scatter_mean
from zerofx.runtime.comm import Comm, make_comm
from zerofx.runtime.pending import Pending

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _comm(way: Algorithm, node_size: int) -> Comm:
    group = dist.group.WORLD
    assert group is not None
    comm = make_comm(group, torch.device("cpu"), node_size)
    # Small enough that some of the members below travel alone.
    return dataclasses.replace(comm, algorithms=Algorithms(way, way, pack_bytes=600))


def _finish(pending: Pending) -> list[Tensor]:
    while not pending.done:
        pending.advance(lambda work: work.wait())
    return pending.values


def _rows(seed: int) -> list[tuple[int, int, torch.dtype]]:
    """Rows, elements of a row and dtype of some parameters."""
    draw = random.Random(seed)
    return [
        (draw.randint(1, 19), draw.choice([1, 3, 40]), draw.choice(DTYPES))
        for _ in range(draw.randint(1, 7))
    ]


def _value(rank: int, member: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + member)
    # Small integers: sums are exact in every dtype, so that all algorithms must agree bitwise.
    return torch.randint(-8, 8, (rows * width,), generator=generator).to(dtype)


def _gathers(way: Algorithm, node_size: int, seeds: int) -> bool:
    comm = _comm(way, node_size)
    for seed in range(seeds):
        outs, chunks, wanted = [], [], []
        for member, (rows, width, dtype) in enumerate(_rows(seed)):
            all_ranks = [_value(r, member, rows, width, dtype) for r in range(comm.size)]
            outs.append(torch.full((comm.size * rows * width,), -99, dtype=dtype))
            chunks.append(all_ranks[comm.rank])
            wanted.append(torch.cat(all_ranks))
        got = _finish(all_gather(outs, chunks, comm, tag=seed << 12))
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), seed
    return True


def _reductions(way: Algorithm, node_size: int, seeds: int) -> bool:
    comm = _comm(way, node_size)
    for seed in range(seeds):
        grads, splits, wanted = [], [], []
        for member, (rows, width, dtype) in enumerate(_rows(seed)):
            chunk = -(-rows // comm.size)
            edges = [min(rank * chunk, rows) * width for rank in range(comm.size + 1)]
            all_ranks = [_value(r, member, rows, width, dtype) for r in range(comm.size)]
            grads.append(all_ranks[comm.rank])
            splits.append([stop - start for start, stop in itertools.pairwise(edges)])
            mean = torch.stack(all_ranks).double().sum(0) / comm.size
            wanted.append(mean.to(dtype)[edges[comm.rank] : edges[comm.rank + 1]])
        pending = reduce_scatter_mean(grads, splits, comm, seed << 12)
        for got, want in zip(_finish(pending), wanted, strict=True):
            # Two hops round 16-bit means twice; each value is at most 8.
            exact = got.dtype is not torch.bfloat16
            torch.testing.assert_close(got, want, rtol=1e-6, atol=0.0 if exact else 8 * 2**-8)
    return True


@pytest.mark.parametrize("way", ["native", "point_to_point", "two_hop"])
@pytest.mark.parametrize("job", [_gathers, _reductions])
def test_four_ranks_on_two_nodes(job: Any, way: Algorithm) -> None:
    assert all(run_ranks(4, job, way, 2, 8))


@pytest.mark.parametrize("job", [_gathers, _reductions])
def test_six_ranks_on_three_nodes_and_on_two(job: Any) -> None:
    assert all(run_ranks(6, job, "two_hop", 2, 3))
    assert all(run_ranks(6, job, "two_hop", 3, 3))


def _crossing(way: Algorithm) -> tuple[int, int, int]:
    """Bytes that this rank sends to another node and in all, of a gather and a reduction."""
    comm, numel, real = _comm(way, 2), 4096, dist.isend
    sent: list[tuple[int, int]] = []

    def isend(tensor: Tensor, dst: int, **kwargs: Any) -> Any:
        sent.append((dst, tensor.nbytes))
        return real(tensor, dst, **kwargs)

    full = torch.zeros(numel)
    with patch.object(dist, "isend", isend):
        _finish(all_gather([full.clone()], [full[: numel // 4].clone()], comm, 1))
        _finish(reduce_scatter_mean([full], [[numel // 4] * 4], comm, 2))
    away = sum(num_bytes for to, num_bytes in sent if to // 2 != comm.rank // 2)
    return away, sum(num_bytes for _, num_bytes in sent), full.nbytes


def test_two_hops_cross_between_nodes_once() -> None:
    for away, total, size in run_ranks(4, _crossing, "point_to_point"):
        assert (away, total) == (size, 2 * size * 3 // 4)
    for away, total, size in run_ranks(4, _crossing, "two_hop"):
        assert (away, total) == (size // 2, 2 * size * 3 // 4)
