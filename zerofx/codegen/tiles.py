"""Which program of a launch handles what: a tile is some blocks of one chunk of one tensor."""

from __future__ import annotations

import dataclasses

from zerofx.ir.kernels import KernelSpec, Repack, errors_of, operand_bytes
from zerofx.ir.parcels import Codec, Member

NUM_WARPS = 4
_TILE_NUMEL = 4096
"""Elements of a tile: 32 for each thread, which fits its registers with room for loads ahead; half
as many with errors beside them, and in repacks, which load from all sources at once, if that leaves
16 bytes for a thread to load: not of halves of blocks. As many for each stripe of words."""
WORD = 8
"""Numbers of four bits in a word."""


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The tiles of one tensor, in every parcel.

    Attributes:
        member: the tensor.
        name: what the kernel calls it.
        first_tile: of the parcel.
        num_tiles: how many.
        first_block: of the parcel.
        num_blocks: how many.
    """

    member: Member
    name: str
    first_tile: int
    num_tiles: int
    first_block: int
    num_blocks: int


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a launch divides its work.

    Attributes:
        rows: blocks of a tile.
        num_tiles: of a parcel.
        num_parcels: of a wire; programs are numbered parcel by parcel.
        num_blocks: of a parcel.
        stretches: of the tensors with elements; none for `Repack`.
        num_parts: 2 if tiles come as two halves of every block, which int4 needs.
        wide: whether 32 bits are too few for addresses.
        stripes: of words, if blocks come in words; see `zerofx.codegen.words`.
    """

    rows: int
    num_tiles: int
    num_parcels: int
    num_blocks: int
    stretches: tuple[Stretch, ...]
    num_parts: int
    wide: bool
    stripes: int = 0

    @property
    def num_programs(self) -> int:
        """Programs of the launch."""
        return self.num_tiles * self.num_parcels


def codecs_of(spec: KernelSpec) -> tuple[Codec, Codec]:
    """Codec of what is read, and of what is written."""
    if isinstance(spec, Repack):
        return spec.codec, spec.out
    return spec.parcels.codec, spec.parcels.codec


def tiling_of(spec: KernelSpec) -> Tiling:
    """Tiles of a kernel."""
    codecs = codecs_of(spec)
    num_parts = 2 if "int4" in (codec.code for codec in codecs) else 1
    halved = errors_of(spec) or (isinstance(spec, Repack) and num_parts == 1)
    stripes = _stripes(spec)
    # One row alone would make scalars of pointers.
    rows = max(2, _TILE_NUMEL * max(1, stripes) // (2 if halved else 1) // codecs[0].block)
    wide = operand_bytes(spec) >= 2**31
    if isinstance(spec, Repack):
        num_tiles = -(-spec.num_blocks // rows)
        return Tiling(rows, num_tiles, spec.num, spec.num_blocks, (), num_parts, wide, stripes)
    parcels, stretches, first_tile = spec.parcels, list[Stretch](), 0
    placed = zip(parcels.members, parcels.first_blocks, strict=True)
    for number, (member, first_block) in enumerate(placed):
        num_blocks = parcels.blocks_of(member)
        num_tiles = -(-num_blocks // rows)
        if num_tiles:
            name = f"t{number}"
            stretch = Stretch(member, name, first_tile, num_tiles, first_block, num_blocks)
            stretches.append(stretch)
        first_tile += num_tiles
    return Tiling(
        rows, first_tile, parcels.num, parcels.num_blocks, tuple(stretches), num_parts, wide
    )


def _stripes(spec: KernelSpec) -> int:
    """Of words, 16 bytes of each for a thread; 0 where blocks come in bytes."""
    if not isinstance(spec, Repack) or spec.num_sources == 1 or spec.out.code == "fp8":
        return 0
    plain = [Codec(each.code, each.block) for each in (spec.codec, spec.out)]
    if spec.codec.code != "int4" or plain != [spec.codec, spec.out]:
        return 0
    return 2 if spec.codec.block >= 64 else 1
