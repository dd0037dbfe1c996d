"""What a kernel of ZeRO++ does, as plain frozen data: `KernelSpec`.

Three kernels exist, and each is one launch: `Pack` (tensors to parcels), `Unpack` (parcels to
tensors) and `Repack` (parcels to parcels, between two hops). `Unpack` and `Repack` take the mean
over their sources. `zerofx.codegen` says what they compute and makes code of them.

`unshard_kernels` and `reduce_kernels` derive them for the parameters of a bucket.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import torch

from zerofx.errors import UnsupportedError
from zerofx.ir.parcels import Codec, Member, Parcels
from zerofx.ir.spec import ParamSpec

TensorSpec = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of an operand."""


@dataclasses.dataclass(frozen=True)
class Pack:
    """Tensors become parcels: cast, quantize and copy together.

    Operands: the members, flat; the wire `uint8[num, parcel_bytes]`; with feedback the errors.
    """

    parcels: Parcels

    @functools.cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of what is read."""
        return _tensors(self.parcels)

    @functools.cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of what is written, every byte of it."""
        parcels = self.parcels
        return (
            (parcels.shape, torch.uint8),
            *_errors(parcels.codec, parcels.num, num_blocks(self)),
        )


@dataclasses.dataclass(frozen=True)
class Unpack:
    """Parcels become tensors: decode, mean over the sources in fp32, cast and copy into place.

    Operands: the wires `uint8[num_sources, num, parcel_bytes]`; the members, flat.

    Attributes:
        parcels: what lies in each wire.
        num_sources: wires, with the contributions of as many ranks; 1 for a gather.
    """

    parcels: Parcels
    num_sources: int = 1

    def __post_init__(self) -> None:
        _check_sources(self.num_sources)

    @functools.cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of what is read."""
        return (((self.num_sources, *self.parcels.shape), torch.uint8),)

    @functools.cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of what is written, every element of it."""
        return _tensors(self.parcels)


@dataclasses.dataclass(frozen=True)
class Repack:
    """Parcels become parcels: decode, mean over the sources in fp32, quantize again.

    Operands: the wires `uint8[num_sources, num, bytes]`; the wire `uint8[num, bytes]`; with
    feedback the errors.

    Attributes:
        num_blocks: blocks of each parcel.
        num: parcels of each wire.
        num_sources: wires, with the contributions of as many ranks.
        codec: of what comes.
        out: of what goes; of the same block size.

    Raises:
        UnsupportedError: the block sizes differ.
    """

    num_blocks: int
    num: int
    num_sources: int
    codec: Codec
    out: Codec

    def __post_init__(self) -> None:
        _check_sources(self.num_sources)
        if self.codec.block != self.out.block:
            raise UnsupportedError(
                f"{self.codec.name} cannot become {self.out.name}", "use blocks of one size"
            )

    @functools.cached_property
    def inputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of what is read."""
        size = self.codec.parcel_bytes(self.num_blocks)
        return (((self.num_sources, self.num, size), torch.uint8),)

    @functools.cached_property
    def outputs(self) -> tuple[TensorSpec, ...]:
        """Shape and dtype of what is written, every byte of it."""
        size = self.out.parcel_bytes(self.num_blocks)
        return (((self.num, size), torch.uint8), *_errors(self.out, self.num, self.num_blocks))


KernelSpec = Pack | Unpack | Repack


def num_blocks(spec: KernelSpec) -> int:
    """Blocks of each parcel; a kernel has nothing to do if there are none."""
    return spec.num_blocks if isinstance(spec, Repack) else spec.parcels.num_blocks


def errors_of(spec: KernelSpec) -> tuple[TensorSpec, ...]:
    """What feedback keeps for `spec` from step to step: its last output, read before it is written.

    Rows and blocks are those of the wire; zeros, which decode to zeros, are a good start.
    """
    return () if isinstance(spec, Unpack) else spec.outputs[1:]


def operand_bytes(spec: KernelSpec) -> int:
    """Bytes that a kernel reads and writes, each once; of errors both."""
    operands = (*spec.inputs, *spec.outputs, *errors_of(spec))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in operands)


def _tensors(parcels: Parcels) -> tuple[TensorSpec, ...]:
    return tuple(((member.numel,), member.dtype) for member in parcels.members)


def _errors(codec: Codec, num: int, num_blocks: int) -> tuple[TensorSpec, ...]:
    size = codec.errors.parcel_bytes(num_blocks)
    return (((num, size), torch.uint8),) if codec.feedback else ()


def _check_sources(num_sources: int) -> None:
    if num_sources < 1:
        raise UnsupportedError(f"a mean over {num_sources} sources does not exist", "use 1 or more")


@dataclasses.dataclass(frozen=True)
class UnshardKernels:
    """A quantized gather (qwZ): each rank packs its chunk; all unpack the wire of all ranks.

    Attributes:
        pack: shards, padded to whole chunks, to one parcel.
        unpack: `num_shards` parcels to padded full values.
    """

    pack: Pack
    unpack: Unpack


@dataclasses.dataclass(frozen=True)
class ReduceKernels:
    """A quantized reduction (qgZ) over d ranks on each of N nodes.

    Attributes:
        pack: full gradients to W parcels. Rows j·N … j·N+N-1 go to rank j of the own node.
        repack: what d ranks of a node sent becomes N parcels, of which parcel n goes to node n;
            None if one hop is enough, that is with one node, or one rank on each.
        unpack: what came last becomes this rank's padded chunk of the mean over all W ranks.
    """

    pack: Pack
    repack: Repack | None
    unpack: Unpack


def unshard_kernels(
    params: Sequence[ParamSpec], codec: Codec, dtypes: Sequence[torch.dtype] | None = None
) -> UnshardKernels:
    """Kernels of a gather of `params`, which have one layout.

    Args:
        params: the parameters; shards have their dtypes.
        codec: how chunks travel.
        dtypes: of the full values, if they are not those of the parameters.

    Raises:
        UnsupportedError: a dtype cannot be quantized.
    """
    num, dtypes = _num_shards(params), dtypes or [p.dtype for p in params]
    chunks = [p.padded_numel // num for p in params]
    pairs = list(zip(params, chunks, strict=True))
    shards = tuple(Member(p.name, chunk, chunk, p.dtype) for p, chunk in pairs)
    fulls = tuple(
        Member(p.name, p.padded_numel, chunk, dtype)
        for (p, chunk), dtype in zip(pairs, dtypes, strict=True)
    )
    return UnshardKernels(Pack(Parcels(shards, codec, 1)), Unpack(Parcels(fulls, codec, num)))


def reduce_kernels(
    params: Sequence[ParamSpec],
    first: Codec,
    second: Codec,
    num_nodes: int,
    dtypes: Sequence[torch.dtype] | None = None,
) -> ReduceKernels:
    """Kernels of a reduction of the gradients of `params`, which have one layout.

    Args:
        params: the parameters; gradients have their true shapes.
        first: codec inside a node, or of the only hop.
        second: codec across nodes; of the same block size.
        num_nodes: N, which divides the number of shards; neighbouring ranks share a node.
        dtypes: of the gradients, if they are not those of the parameters.

    Raises:
        UnsupportedError: the shards do not divide into `num_nodes`, the block sizes differ, or a
            dtype cannot be quantized.
    """
    num, dtypes = _num_shards(params), dtypes or [p.dtype for p in params]
    full = tuple(
        Member(p.name, p.numel, p.padded_numel // num, dtype)
        for p, dtype in zip(params, dtypes, strict=True)
    )
    chunk = tuple(dataclasses.replace(member, numel=member.chunk) for member in full)
    pack = Pack(Parcels(full, first, num, num_nodes))
    num_local = pack.parcels.num_local
    if num_nodes == 1 or num_local == 1:
        return ReduceKernels(pack, None, Unpack(Parcels(chunk, first.plain, 1), num))
    repack = Repack(pack.parcels.num_blocks, num_nodes, num_local, first.plain, second)
    return ReduceKernels(pack, repack, Unpack(Parcels(chunk, second.plain, 1), num_nodes))


def _num_shards(params: Sequence[ParamSpec]) -> int:
    return params[0].layout.num_shards
