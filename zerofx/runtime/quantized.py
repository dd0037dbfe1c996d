"""Gathers and reductions that send codes instead of numbers (qwZ and qgZ of ZeRO++).

Kernels make and read parcels (see `zerofx.ir.parcels`); here parcels travel. What is handed to a
process group is uint8, scales inside. Kernels come with the program: this package knows what they
read and write, not how they compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerofx.runtime import collectives
from zerofx.runtime.comm import Comm
from zerofx.runtime.drift import Check, DriftMonitor
from zerofx.runtime.feedback import CodingErrors, Shapes
from zerofx.runtime.frozen import FrozenCodes
from zerofx.runtime.params import ParamState
from zerofx.runtime.pending import Pending

Kernel = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]
"""Called with inputs, outputs and a seed."""


@dataclasses.dataclass(frozen=True)
class Gathering:
    """Kernels of one quantized gather.

    Attributes:
        pack: padded chunks of all members to `uint8[1, parcel_bytes]`.
        unpack: `uint8[1, W, parcel_bytes]` to the padded full values, 1-D.
        parcel_bytes: of one rank.
        places: of each member, where it lies in a parcel, and where in one of its own; see
            `zerofx.ir.parcels.Parcels.places`.
        own_bytes: of a parcel that holds one member alone.
        check: decodes a parcel again.
    """

    pack: Kernel
    unpack: Kernel
    parcel_bytes: int
    places: tuple[tuple[tuple[int, int, int], ...], ...]
    own_bytes: tuple[int, ...]
    check: Check

    def apart(self, parcels: Tensor) -> list[Tensor]:
        """The codes of each member in parcels of its own: bytes are moved, nothing is decoded.

        Args:
            parcels: `uint8[num, parcel_bytes]`.

        Returns:
            `uint8[num, own_bytes]` each.
        """
        out = [parcels.new_zeros(len(parcels), size) for size in self.own_bytes]
        for own, places in zip(out, self.places, strict=True):
            for here, count, there in places:
                own[:, there : there + count] = parcels[:, here : here + count]
        return out

    def together(self, own: Sequence[Tensor], parcel: Tensor) -> None:
        """Fill a parcel, `uint8[parcel_bytes]`, from those of each member alone."""
        parcel.zero_()
        for each, places in zip(own, self.places, strict=True):
            for here, count, there in places:
                parcel[here : here + count] = each[there : there + count]


Take = Callable[[], list[Tensor]]
"""Takes memory for the padded full values of the members that travel, each 1-D."""

GatheringOf = Callable[[Sequence[int]], Gathering]
"""The kernels for those members of a bucket that travel, by their places."""


@dataclasses.dataclass(frozen=True)
class Reducing:
    """Kernels of one quantized reduction over d ranks on each of N nodes.

    Attributes:
        pack: full gradients, 1-D, to `uint8[W, parcel_bytes]`.
        repack: `uint8[d, N, parcel_bytes]` to `uint8[N, across_bytes]`; `None` for one hop.
        unpack: `uint8[W or N, 1, bytes]` to this rank's padded chunks, 1-D.
        parcel_bytes: in the only hop, or inside a node.
        across_bytes: of a parcel between nodes.
        chunks: dtype and elements of each padded chunk.
        errors: of each hop, what feedback keeps.
        checks: of each hop, what decodes again what its kernel coded.
    """

    pack: Kernel
    repack: Kernel | None
    unpack: Kernel
    parcel_bytes: int
    across_bytes: int
    chunks: tuple[tuple[torch.dtype, int], ...]
    errors: Shapes
    checks: tuple[Check, ...]


@dataclasses.dataclass(frozen=True)
class CodeMemory:
    """What a sharded model remembers of codes.

    Attributes:
        frozen: codes of frozen parameters.
        errors: of coding gradients.
        drift: compares codes with numbers.
    """

    frozen: FrozenCodes
    errors: CodingErrors
    drift: DriftMonitor

    @staticmethod
    def empty(drift_every: int | None) -> CodeMemory:
        """That of a model which has coded nothing yet."""
        return CodeMemory(FrozenCodes(), CodingErrors(), DriftMonitor(drift_every))


def gather_codes(
    kernels: Gathering,
    take: Take,
    chunks: Sequence[Tensor],
    comm: Comm,
    tag: int,
    states: Sequence[ParamState | None],
    memory: CodeMemory,
    arrived: Callable[[Tensor], None] = lambda parcels: None,
) -> Pending:
    """Start gathering; see `zerofx.runtime.collectives.all_gather`.

    Until the codes have arrived they are all that takes memory.

    Args:
        kernels: of these members.
        take: memory of the values that the codes become.
        chunks: each 1-D, this rank's padded chunk.
        comm: the axis.
        tag: number that must agree on all ranks.
        states: whose chunks they are.
        memory: of the model.
        arrived: called with the parcels of all ranks, `uint8[W, parcel_bytes]`.
    """
    wire = chunks[0].new_empty(comm.size * kernels.parcel_bytes, dtype=torch.uint8)
    own = wire.chunk(comm.size)[comm.rank]
    if not memory.frozen.load(states, kernels, own):
        kernels.pack(chunks, [own.view(1, -1)], 0)
        memory.frozen.save(states, kernels, own)
        memory.drift.look(kernels.check, chunks, own.view(1, -1))

    def unpack(_: list[Tensor]) -> list[Tensor]:
        outs = take()
        kernels.unpack([wire.view(1, comm.size, -1)], outs, 0)
        arrived(wire.view(comm.size, -1))
        return outs

    return collectives.all_gather([wire], [own], comm, tag).then(unpack)


def gather_kept_codes(
    kernels: Sequence[Gathering],
    take: Take,
    copies: list[Tensor],
    comm: Comm,
    tag: int,
) -> Pending:
    """Start gathering codes that the ranks of a node keep: they are decoded, and not made anew.

    Args:
        kernels: of each member alone.
        take: memory of the values that the codes become.
        copies: each 1-D, this rank's part of all ranks' parcels, in order.
        comm: the ranks of the node.
        tag: number that must agree on all ranks.
    """
    wires = [copy.new_empty(comm.size * copy.numel()) for copy in copies]

    def unpack(_: list[Tensor]) -> list[Tensor]:
        outs = take()
        for each, wire, out in zip(kernels, wires, outs, strict=True):
            each.unpack([wire.view(1, -1, each.parcel_bytes)], [out], 0)
        return outs

    return collectives.all_gather(wires, copies, comm, tag).then(unpack)


def reduce_codes(
    kernels: Reducing,
    grads: Sequence[Tensor],
    owned: Sequence[int],
    comm: Comm,
    tag: int,
    world: Comm,
    states: Sequence[ParamState | None],
    memory: CodeMemory,
) -> Pending:
    """Start the mean over `comm` of full gradients, of which this rank keeps its chunks.

    Args:
        kernels: of these members.
        grads: each 1-D and contiguous.
        owned: elements of each that this rank owns.
        comm: the axis.
        tag: number that must agree on all ranks; it also seeds stochastic rounding.
        world: all ranks of the model: no two of them round alike, replicas neither.
        states: whose gradients they are.
        memory: of the model.
    """
    wire = grads[0].new_empty(comm.size, kernels.parcel_bytes, dtype=torch.uint8)
    seed = tag * 2 * world.size + world.rank
    errors = memory.errors.of(states, kernels.errors, wire.device)
    kernels.pack(grads, [wire, *errors[0]], seed)
    memory.drift.look(kernels.checks[0], grads, wire)

    def finish(wires: list[Tensor]) -> list[Tensor]:
        outs = [wires[0].new_empty(numel, dtype=dtype) for dtype, numel in kernels.chunks]
        kernels.unpack([wires[0][:, None]], outs, 0)
        return [out[:numel] for out, numel in zip(outs, owned, strict=True)]

    repack = kernels.repack
    if repack is None:
        everyone = range(comm.size)
        return collectives.all_to_all(wire, everyone, comm.rank, comm, tag).then(finish)

    def mean(arrived: Tensor) -> Tensor:
        means = wire.new_empty(comm.num_nodes, kernels.across_bytes)
        repack([arrived], [means, *errors[1]], seed + world.size)
        memory.drift.look(kernels.checks[1], [arrived], means)
        return means

    pending = exchange_two_hop(wire, mean, comm, tag).then(finish)
    pending.is_short = True  # the hop between nodes overlaps with what follows
    return pending


def exchange_two_hop(
    rows: Tensor, mean: Callable[[Tensor], Tensor], comm: Comm, tag: int
) -> Pending:
    """Start sending each rank its row by way of the rank of this node that shares its column.

    Args:
        rows: contiguous, one for each rank; those of a column lie together.
        mean: makes one row for each node of what came from the ranks of this node, a tensor
            `[d, N, …]` of their rows for the ranks of this column.
        comm: the axis, d ranks on each of N nodes.
        tag: as for `zerofx.runtime.collectives.all_gather`.
    """

    def cross(arrived: list[Tensor]) -> Pending:
        return collectives.all_to_all(mean(arrived[0]), comm.column_positions, comm.node, comm, tag)

    by_column = rows.view(comm.node_size, comm.num_nodes, -1)
    return collectives.all_to_all(by_column, comm.node_positions, comm.column, comm, tag).then(
        cross
    )
