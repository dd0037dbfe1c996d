"""What each rank holds of a value, in plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from zerofx.ir.spec import ParamSpec

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


def shards_of(full: Tensor, spec: ParamSpec) -> list[Tensor]:
    """What each rank owns of the full value of a parameter, as copies, in rank order."""
    layout = spec.layout
    if not layout.sharded:
        return [full.clone() for _ in range(layout.num_replicas)]
    pieces = [full[slice(*spec.rows(shard))] for shard in range(layout.num_shards)]
    return [piece.clone() for _ in range(layout.num_replicas) for piece in pieces]


def split_inside(fulls: Sequence[Tensor], spec: ParamSpec) -> list[Tensor]:
    """The secondary shard that each rank keeps of its full value; 1-D, padded with NaN."""
    size, numel = spec.layout.node_size, spec.secondary_numel
    shards: list[Tensor] = []
    for rank, full in enumerate(fulls):
        padded = full.new_full((size * numel,), torch.nan)
        padded[: full.numel()] = full.reshape(-1)
        shards.append(padded.view(size, numel)[rank % size].clone())
    return shards


def join_inside(shards: Sequence[Tensor], spec: ParamSpec) -> list[Tensor]:
    """The full value on each rank, from the secondary shards of its node."""
    size = spec.layout.node_size
    nodes = [torch.cat(list(shards[start : start + size])) for start in range(0, len(shards), size)]
    return [
        nodes[rank // size][: spec.numel].view(spec.shape).clone() for rank in range(len(shards))
    ]


def keeps_shape(node: fx.Node) -> bool:
    """Whether a node is a view that changes no shape: of a shard, for one."""
    source = node.args[0] if node.target in _VIEWS else None
    before = source.meta.get("val") if isinstance(source, fx.Node) else None
    after = node.meta.get("val")
    return isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape
