"""How parameters lie on the mesh: for any shape and any number of ranks."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofx.ir.spec import Layout, ParamSpec
from zerofx.sim.lockstep import shards_of

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
counts = st.integers(1, 8)
any_spec = settings(max_examples=200)


def spec_of(shape: tuple[int, ...], shards: int, replicas: int = 1) -> ParamSpec:
    layout = Layout(1, shards, replicas, False)
    return ParamSpec("w", 0, torch.Size(shape), torch.float32, True, layout)


@any_spec
@given(shapes, counts)
def test_rows_cut_dim_0_into_neighbours(shape: tuple[int, ...], shards: int) -> None:
    spec = spec_of(shape, shards)
    edges = [spec.rows(shard) for shard in range(shards)]
    assert edges[0][0] == 0 and edges[-1][1] == shape[0]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(edges))
    assert all(0 <= stop - start <= spec.chunk_rows for start, stop in edges)


@any_spec
@given(shapes, counts)
def test_rows_are_those_of_dtensor(shape: tuple[int, ...], shards: int) -> None:
    """`Shard(0)` cuts as `torch.chunk`, and leaves the last ranks empty if chunks run out."""
    spec = spec_of(shape, shards)
    pieces = list(torch.empty(shape).chunk(shards)) if shape[0] else []
    lengths = [len(piece) for piece in pieces] + [0] * (shards - len(pieces))
    assert lengths == [stop - start for start, stop in map(spec.rows, range(shards))]


@any_spec
@given(shapes, counts)
def test_padding_is_less_than_one_row_per_rank(shape: tuple[int, ...], shards: int) -> None:
    spec = spec_of(shape, shards)
    padding = spec.padded_numel - spec.numel
    assert padding >= 0
    assert shards == 1 or not spec.numel or padding < shards * spec.row_numel
    assert spec.padded_numel == spec.chunk_rows * spec.row_numel * shards or shards == 1


@any_spec
@given(shapes, counts, st.integers(1, 3))
def test_shards_add_up_to_the_full_value(
    shape: tuple[int, ...], shards: int, replicas: int
) -> None:
    spec = spec_of(shape, shards, replicas)
    full = torch.randn(shape)
    parts = shards_of(full, spec)
    assert len(parts) == shards * replicas
    for replica in range(replicas):
        mine = parts[replica * shards : (replica + 1) * shards]
        assert torch.equal(torch.cat(mine) if shards > 1 else mine[0], full)
        assert [part.shape for part in mine] == [spec.shard_shape(i) for i in range(shards)]


def test_scalars_are_replicated() -> None:
    spec = spec_of((), 1, 4)
    assert (spec.chunk_rows, spec.numel, spec.padded_numel, spec.row_numel) == (1, 1, 1, 1)
    assert spec.shard_shape(0) == torch.Size()
    assert [part.item() for part in shards_of(torch.tensor(3.0), spec)] == [3.0] * 4


def test_shards_are_copies() -> None:
    full = torch.zeros(4, 2)
    for spec in (spec_of((4, 2), 2), spec_of((4, 2), 1, 2)):
        shards_of(full, spec)[0].fill_(1.0)
    assert full.sum() == 0


def test_layout_names() -> None:
    assert Layout(1, 4, 1, False).name == "shard4"
    assert Layout(1, 2, 2, True).name == "shard2x2.resident"
    assert Layout(1, 1, 4, False).name == "replicate4"
