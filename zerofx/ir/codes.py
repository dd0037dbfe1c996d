"""What travels as codes: kernels and bytes of the quantized collectives of a program (ZeRO++)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.edit import Editor
from zerofx.ir.facts import NODE, facts
from zerofx.ir.kernels import (
    KernelSpec,
    ReduceKernels,
    UnshardKernels,
    reduce_kernels,
    unshard_kernels,
)
from zerofx.ir.parcels import Codec, Parcels
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends.

    Attributes:
        wire_bytes: all of them.
        scale_bytes: those that are no codes.
        across_bytes: those that leave its node.
    """

    wire_bytes: int = 0
    scale_bytes: int = 0
    across_bytes: int = 0


def gather_kernels(
    program: Program, start: fx.Node, members: Sequence[int] | None = None
) -> UnshardKernels:
    """Kernels of a quantized `unshard_start`, which was given its waits.

    Args:
        program: where it is.
        start: the node.
        members: places of those that travel, if not all do.
    """
    waits = ops.waits_of(start)
    places = range(len(waits)) if members is None else members
    specs = specs_of(program, start)
    (codec,) = ops.codecs(start)
    return unshard_kernels(
        [specs[place] for place in places],
        Codec.parse(codec),
        [_dtype(waits[place]) for place in places],
    )


def reduction_kernels(program: Program, start: fx.Node) -> ReduceKernels:
    """Kernels of a quantized `reduce_start`; gradients travel in the layout's `reduce_dtype`."""
    specs = specs_of(program, start)
    first, second = map(Codec.parse, ops.codecs(start))
    layout = specs[0].layout
    dtypes = [layout.reduce_dtype or _dtype(grad) for grad in ops.gradients(start)]
    return reduce_kernels(specs, first, second, layout.num_nodes, dtypes)


def kernels_at(program: Program, node: fx.Node) -> tuple[KernelSpec, ...]:
    """Kernels that run where a collective starts, which make codes, or at its first wait."""
    start = ops.collective_of(node)
    if start is None or not ops.codecs(start):
        return ()
    waits = start is not node
    if waits and ops.waits_of(start)[0] is not node:
        return ()
    if ops.is_call(start, ops.UNSHARD_START):
        gather = gather_kernels(program, start)
        if waits:
            return (gather.unpack,)
        # Inside the node codes that are there are sent.
        return () if facts(start).axis == NODE else (gather.pack,)
    reduction = reduction_kernels(program, start)
    if waits:
        return (reduction.unpack,)
    return (reduction.pack, *([reduction.repack] if reduction.repack else []))


def exact_bytes(program: Program, start: fx.Node) -> int:
    """What a rank would send in a collective if numbers travelled."""
    total = all_reduced_bytes(program, start)
    for spec, wait in zip(specs_of(program, start), ops.waits_of(start), strict=True):
        if ops.is_call(start, ops.UNSHARD_START):
            total += gathered_numel(spec) * _dtype(wait).itemsize
        else:
            total += scattered_numel(spec) * _reduced_dtype(start, spec).itemsize
    return total


def all_reduced_bytes(program: Program, start: fx.Node) -> int:
    """What a rank sends to the other replicas of its shards: in reductions only, and as numbers."""
    if not ops.is_call(start, ops.REDUCE_START):
        return 0
    return sum(
        all_reduced_numel(spec) * _reduced_dtype(start, spec).itemsize
        for spec in specs_of(program, start)
    )


def sent(program: Program, start: fx.Node) -> Sent:
    """What a rank sends in a quantized collective, as its kernels write it.

    With replicas the shards of the mean are then all-reduced, which is exact.
    """
    layout = specs_of(program, start)[0].layout
    if facts(start).axis == NODE:
        kept, others = kept_codes(program, start), layout.node_size - 1
        return Sent(others * kept.wire_bytes, others * kept.scale_bytes)
    if ops.is_call(start, ops.UNSHARD_START):
        kernels = gather_kernels(program, start)
        once = _times(kernels.pack.parcels, kernels.unpack.parcels.num - 1)
        across = layout.sent_across(once.wire_bytes, reduces=False)
        return dataclasses.replace(once, across_bytes=across)
    kernels = reduction_kernels(program, start)
    parcels = kernels.pack.parcels
    if kernels.repack is not None:
        first = _times(parcels, parcels.num - parcels.num_nodes)
        last = _times(kernels.unpack.parcels, parcels.num_nodes - 1)
    else:
        first, last = Sent(), _times(parcels, parcels.num - 1)
    across = last.wire_bytes if layout.node_size < layout.num_shards else 0
    all_reduced = all_reduced_bytes(program, start)
    return Sent(
        first.wire_bytes + last.wire_bytes + all_reduced,
        first.scale_bytes + last.scale_bytes,
        across + (all_reduced if layout.replicas_apart else 0),
    )


def kept_codes(program: Program, start: fx.Node) -> Sent:
    """What a rank keeps of the codes of a gather: each member in parcels of its own."""
    found = [
        _times(gather_kernels(program, start, [place]).unpack.parcels, spec.layout.num_nodes)
        for place, spec in enumerate(specs_of(program, start))
    ]
    return Sent(sum(each.wire_bytes for each in found), sum(each.scale_bytes for each in found))


def wire_dtype(program: Program, start: fx.Node) -> str:
    """What a collective sends: a codec, two of them for two hops, or a dtype."""
    names = ops.codecs(start)
    gathers = ops.is_call(start, ops.UNSHARD_START)
    if names:
        both = not gathers and reduction_kernels(program, start).repack is not None
        return " → ".join(names if both else names[:1])
    spec = program.params.get(next(iter(facts(start).members), ""))
    stated = None if gathers or spec is None else spec.layout.reduce_dtype
    dtypes = [stated or _dtype(n) for n in (ops.waits_of if gathers else ops.gradients)(start)]
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def note_sent(edit: Editor, start: fx.Node) -> None:
    """Write down what a collective sends, if it sends codes."""
    if ops.codecs(start):
        edit.note(start, **dataclasses.asdict(sent(edit.program, start)))


def held_bytes(program: Program, start: fx.Node) -> int:
    """Bytes of the parcels that a rank holds while a collective is under way; 0 if it is exact."""
    if not ops.is_start(start) or not ops.codecs(start):
        return 0
    if ops.is_call(start, ops.UNSHARD_START):
        return math.prod(gather_kernels(program, start).unpack.parcels.shape)
    # What it sends, and what arrives in the first hop.
    return 2 * math.prod(reduction_kernels(program, start).pack.parcels.shape)


def values_from(start: fx.Node) -> fx.Node:
    """Where the values of a gather take memory: at its start, or where its codes are read."""
    waits = ops.waits_of(start)
    return waits[0] if waits and ops.codecs(start) else start


def gather_at(node: fx.Node) -> fx.Node | None:
    """The gather whose values take memory where `node` is."""
    if not ops.is_call(node, ops.UNSHARD_START, ops.UNSHARD_WAIT):
        return None
    start = ops.collective_of(node)
    return start if start is not None and values_from(start) is node else None


def specs_of(program: Program, start: fx.Node) -> list[ParamSpec]:
    """The parameters that a collective moves, in order."""
    return [program.params[name] for name in facts(start).members]


def gathered_numel(spec: ParamSpec) -> int:
    """Elements that a rank sends in a gather: its chunk, padding included, to all others."""
    shards = spec.layout.num_shards
    return spec.padded_numel // shards * (shards - 1)


def scattered_numel(spec: ParamSpec) -> int:
    """Elements that a rank sends in a reduce-scatter: what others own of its gradient."""
    shards = spec.layout.num_shards
    return spec.numel * (shards - 1) // shards


def all_reduced_numel(spec: ParamSpec) -> int:
    """Elements that a rank sends to the other replicas of its shard."""
    shards, replicas = spec.layout.num_shards, spec.layout.num_replicas
    return 2 * spec.numel * (replicas - 1) // (replicas * shards)


def _times(parcels: Parcels, count: int) -> Sent:
    codec, blocks = parcels.codec, parcels.num_blocks
    return Sent(count * codec.parcel_bytes(blocks), count * codec.scale_bytes(blocks))


def _reduced_dtype(start: fx.Node, spec: ParamSpec) -> torch.dtype:
    grad = ops.gradients(start)[facts(start).members.index(spec.name)]
    return spec.layout.reduce_dtype or _dtype(grad)


def _dtype(node: fx.Node) -> torch.dtype:
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    return value.dtype
