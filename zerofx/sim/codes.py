"""Nodes of a program that send codes, for all ranks in one process; what lockstep does there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.codes import gather_kernels, reduction_kernels, specs_of
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec
from zerofx.sim.quantized import (
    Errors,
    reduce_quantized,
    run_kernel,
    unshard_quantized,
    zero_errors,
)

ByMember = Sequence[Sequence[Tensor]]
"""Of each member, the values of all ranks."""

ErrorsByBucket = dict[tuple[str, ...], list[Errors]]
"""By the parameters of a bucket, errors of the ranks of each replica."""


def gather_codes(program: Program, start: fx.Node, shards: ByMember) -> dict[fx.Node, list[Tensor]]:
    """What each rank gets of each member of a quantized `unshard_start`."""
    specs, kernels = specs_of(program, start), gather_kernels(program, start)
    num, padded = specs[0].layout.num_shards, _padded(specs, shards)
    fulls = [
        full
        for replica in _replicas(list(zip(*padded, strict=True)), num)
        for full in unshard_quantized(kernels, replica)
    ]
    return {
        shard: [full[at][: spec.numel].view(spec.shape) for full in fulls]
        for at, (shard, spec) in enumerate(zip(ops.members(start), specs, strict=True))
    }


def split_codes(program: Program, start: fx.Node, shards: ByMember) -> dict[str, list[Tensor]]:
    """By parameter, what each rank keeps of its codes: the parcels of one rank for each node."""
    specs, kept = specs_of(program, start), dict[str, list[Tensor]]()
    num, size = specs[0].layout.num_shards, specs[0].layout.node_size
    for place, (spec, chunks) in enumerate(zip(specs, _padded(specs, shards), strict=True)):
        pack = gather_kernels(program, start, [place]).pack
        wires = [run_kernel(pack, [chunk])[0] for chunk in chunks]
        kept[spec.name] = [
            torch.cat(wires[rank // num * num :][:num]).chunk(size)[rank % size].clone()
            for rank in range(len(wires))
        ]
    return kept


def join_codes(
    program: Program, start: fx.Node, kept: Mapping[str, Sequence[Tensor]]
) -> dict[fx.Node, list[Tensor]]:
    """What each rank gets of each member from the codes that its node keeps."""
    specs = specs_of(program, start)
    size = specs[0].layout.node_size
    values: dict[fx.Node, list[Tensor]] = {}
    for place, (shard, spec) in enumerate(zip(ops.members(start), specs, strict=True)):
        unpack, mine = gather_kernels(program, start, [place]).unpack, kept[spec.name]
        nodes = [torch.cat(list(mine[rank // size * size :][:size])) for rank in range(len(mine))]
        values[shard] = [
            run_kernel(unpack, [wire[None]])[0][: spec.numel].view(spec.shape) for wire in nodes
        ]
    return values


def mean_codes(
    program: Program, start: fx.Node, grads: ByMember, shards: ByMember, errors: ErrorsByBucket
) -> dict[fx.Node, list[Tensor]]:
    """What each rank keeps of each member of a quantized `reduce_start`.

    Replicas exchange numbers: the mean over them is exact. With feedback, `errors` are renewed.
    """
    specs, kernels = specs_of(program, start), reduction_kernels(program, start)
    num, sent = specs[0].layout.num_shards, kernels.pack.parcels.members
    flat = [
        [grad.to(member.dtype).reshape(-1).contiguous() for grad in each]
        for each, member in zip(grads, sent, strict=True)
    ]
    replicas = _replicas(list(zip(*flat, strict=True)), num)
    kept = errors.setdefault(facts(start).members, [zero_errors(kernels) for _ in replicas])
    chunks = [
        chunk
        for replica, its in zip(replicas, kept, strict=True)
        for chunk in reduce_quantized(kernels, replica, errors=its)
    ]
    values: dict[fx.Node, list[Tensor]] = {}
    for at, shard in enumerate(ops.members(start)):
        wide = torch.promote_types(sent[at].dtype, torch.float32)
        of_rank = torch.stack([chunk[at].to(wide) for chunk in chunks])
        means = of_rank.view(-1, num, of_rank.shape[1]).mean(0).to(sent[at].dtype)
        values[shard] = [
            means[rank % num][: owner.numel()].view(owner.shape).to(owner.dtype)
            for rank, owner in enumerate(shards[at])
        ]
    return values


def _padded(specs: Sequence[ParamSpec], shards: ByMember) -> list[list[Tensor]]:
    """Of each member, the flat chunk of each rank."""
    return [
        [
            F.pad(s.reshape(-1), (0, spec.padded_numel // spec.layout.num_shards - s.numel()))
            for s in each
        ]
        for each, spec in zip(shards, specs, strict=True)
    ]


def _replicas(
    by_rank: Sequence[tuple[Tensor, ...]], num: int
) -> list[Sequence[tuple[Tensor, ...]]]:
    return [by_rank[start : start + num] for start in range(0, len(by_rank), num)]
