"""What a collective needs memory for while it is under way, beside its values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from zerofx.cost.comm import Algorithms
from zerofx.ir.codes import held_bytes, specs_of
from zerofx.ir.ops import UNSHARD_START, gradients, is_call, waits_of
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec


def message_bytes(program: Program, start: fx.Node, algorithms: Algorithms) -> int:
    """Bytes of the buffers of a collective, of which at least one parameter is known."""
    layout = specs_of(program, start)[0].layout
    if layout.num_shards > 1 and (codes := held_bytes(program, start)):
        return codes
    if not is_call(start, UNSHARD_START):
        return _reduction(program, start, algorithms)
    if layout.num_shards == 1 or not layout.temporary:
        return 0
    sizes = map(program.full_bytes, waits_of(start))
    return _packed(sizes, layout.num_shards * algorithms.pack_chunk_bytes)


def is_copied(spec: ParamSpec, grad: fx.Node) -> bool:
    """Whether a gradient travels as a copy in another dtype."""
    return _sent_dtype(spec, grad) is not grad.meta["val"].dtype


def _reduction(program: Program, start: fx.Node, algorithms: Algorithms) -> int:
    """Copies in another dtype, small gradients packed, and parts received."""
    pairs = list(zip(specs_of(program, start), gradients(start), strict=True))
    sizes = [spec.padded_numel * _sent_dtype(spec, grad).itemsize for spec, grad in pairs]
    copied = [size for size, pair in zip(sizes, pairs, strict=True) if is_copied(*pair)]
    shards = pairs[0][0].layout.num_shards
    if shards == 1:
        return sum(copied)
    received = max(0, shards - 2) * sum(sizes) // shards
    direct = algorithms.reduce_scatter == "point_to_point"
    packed = _packed(sizes, algorithms.pack_bytes)
    return sum(copied) + packed + (received if direct else 0)


def _sent_dtype(spec: ParamSpec, grad: fx.Node) -> torch.dtype:
    return spec.layout.reduce_dtype or grad.meta["val"].dtype


def _packed(sizes: Iterable[int], most: int) -> int:
    """Bytes of a message of all that have at most so many; one alone needs none."""
    small = [size for size in sizes if size <= most]
    return sum(small) if len(small) > 1 else 0
