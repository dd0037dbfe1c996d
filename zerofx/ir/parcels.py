"""Parcels: tensors of a bucket as bytes on a wire, block-quantized (ZeRO++ §3).

Tensors of a bucket are divided into equal chunks, one for each rank. A *parcel* is chunk number p
of every tensor, written as small codes. Numbers are coded in blocks of `Codec.block`, each with a
scale of its own; a tensor starts at a block, and what is missing from its last block counts as
zeros. The parcels of a wire are the rows of one uint8 tensor:

    codes, block after block │ scales, fp32 │ lows, fp32 (asymmetric codecs only)

Scales and lows have a slot for each block, rounded up to four slots: every section of every parcel
starts at a multiple of 16 bytes.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Literal, cast, get_args

import torch

from zerofx.errors import ConfigError, UnsupportedError, nearest

Code = Literal["int8", "int4", "fp8"]
Rounding = Literal["nearest", "stochastic"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What tensors may hold; the arithmetic is fp32 for all."""

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)
_SLOTS = 4
"""Scales of four blocks take 16 bytes, which is what one thread moves at a time."""


@dataclasses.dataclass(frozen=True)
class Codec:
    """How a block of numbers is written.

    Attributes:
        code: `int8`, `int4` (element i and element i + block/2 of a block share a byte), or `fp8`
            (e4m3, scaled so that the largest number is 448).
        block: numbers that share a scale; a power of two from 32 to 2048.
        symmetric: a block is scaled by its largest magnitude; otherwise its smallest number becomes
            code 0 and its largest the last code.
        rounding: to the nearest code, ties to even; or up or down at random so that the mean is
            right (`stochastic`), where the random bits depend on the seed and the position only.
        feedback: what coding takes from a block is kept, and added the next time; see `errors`.

    Raises:
        ConfigError: for any other value, and for `fp8` asymmetric or stochastic.
    """

    code: Code = "int8"
    block: int = 256
    symmetric: bool = True
    rounding: Rounding = "nearest"
    feedback: bool = False

    def __post_init__(self) -> None:
        if self.code not in get_args(Code) or self.rounding not in get_args(Rounding):
            raise ConfigError(
                f"codec {self.code!r} with rounding {self.rounding!r} does not exist",
                nearest(self.code.lower(), get_args(Code))
                + 'codes are "int8", "int4" and "fp8", roundings "nearest" and "stochastic"',
            )
        if self.block not in _BLOCKS:
            near = min(_BLOCKS, key=lambda size: abs(size - self.block))
            raise ConfigError(
                f"blocks of {self.block} numbers are not possible",
                f"use a power of two from {_BLOCKS[0]} to {_BLOCKS[-1]}, such as {near}",
            )
        if self.code == "fp8" and not (self.symmetric and self.rounding == "nearest"):
            raise ConfigError(
                "fp8 codes are symmetric and rounded to the nearest",
                "use int8 for asymmetric codes or stochastic rounding",
            )

    @staticmethod
    def parse(text: str) -> Codec:
        """The codec that `name` writes; blocks are of 256 numbers if the text does not say.

        Args:
            text: such as `int8`, `int4x128` or `int8x256.asymmetric.stochastic.feedback`; `fp8` may
                bear its format, as `fp8-e4m3`.

        Raises:
            ConfigError: it names no codec.
        """
        kinds = r"(\.asymmetric)?(\.stochastic)?(\.feedback)?"
        found = re.fullmatch(rf"(\w+?)(?:x(\d+))?{kinds}", re.sub("^fp8[-_]e4m3", "fp8", text))
        if found is None:
            ends = ("", ".asymmetric", ".stochastic", ".feedback")
            sizes = ("", *(f"x{size}" for size in _BLOCKS))
            names = list(map("".join, itertools.product(get_args(Code), sizes, ends)))
            raise ConfigError(
                f"{text!r} is no codec",
                nearest(text.lower(), names)
                + 'write "int8", "int4" or "fp8", then if need be "x128" for blocks of 128 '
                'numbers, ".asymmetric", ".stochastic", ".feedback", in this order',
            )
        code, block, asymmetric, stochastic, feedback = found.groups()
        rounding: Rounding = "stochastic" if stochastic else "nearest"
        # Checked by the class itself.
        return Codec(cast(Code, code), int(block or 256), not asymmetric, rounding, bool(feedback))

    @property
    def errors(self) -> Codec:
        """How errors of feedback are kept from step to step: a byte each, and their scales."""
        return Codec("int8", self.block)

    @property
    def plain(self) -> Codec:
        """The same bytes, for whoever only reads them."""
        return dataclasses.replace(self, feedback=False)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.code == "int4" else 8

    @property
    def block_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return self.block * self.bits // 8

    @property
    def num_params(self) -> int:
        """Numbers in fp32 beside the codes of a block: its scale, and its low if asymmetric."""
        return 1 if self.symmetric else 2

    @property
    def name(self) -> str:
        """What printers show: `int8x256`, `int4x128.asymmetric.stochastic`."""
        kinds = (
            (not self.symmetric, ".asymmetric"),
            (self.rounding == "stochastic", ".stochastic"),
            (self.feedback, ".feedback"),
        )
        return f"{self.code}x{self.block}" + "".join(kind for has, kind in kinds if has)

    def num_slots(self, num_blocks: int) -> int:
        """Slots for scales: one for each block, rounded up to four."""
        return -(-num_blocks // _SLOTS) * _SLOTS

    def scale_bytes(self, num_blocks: int) -> int:
        """Bytes of a parcel that are no codes: its scales and lows."""
        return 4 * self.num_params * self.num_slots(num_blocks)

    def parcel_bytes(self, num_blocks: int) -> int:
        """Bytes of a parcel of `num_blocks`; a sympy symbol gives the formula."""
        return num_blocks * self.block_bytes + self.scale_bytes(num_blocks)


def place(chunk: int, num_local: int, num_nodes: int) -> int:
    """Row of a wire where chunk number `chunk` lies, if it travels in two hops.

    Chunk p belongs to rank p, the (p mod d)-th of node p div d, for d = `num_local` ranks on each
    of N = `num_nodes` nodes. The first hop brings it to the rank of the sender's node with the same
    place in the node; so what goes to one rank must lie together (ZeRO++ §3.3).
    """
    return chunk % num_local * num_nodes + chunk // num_local


@dataclasses.dataclass(frozen=True)
class Member:
    """One tensor of a bucket.

    Attributes:
        name: of the parameter, for messages and comments.
        numel: elements of the tensor, which is flat and contiguous.
        chunk: elements of it in each parcel; the last chunks may be short or empty.
        dtype: of the tensor.
    """

    name: str
    numel: int
    chunk: int
    dtype: torch.dtype

    def count(self, parcel: int) -> int:
        """Elements of chunk number `parcel`."""
        return min(max(self.numel - parcel * self.chunk, 0), self.chunk)


@dataclasses.dataclass(frozen=True)
class Parcels:
    """What lies where in the parcels of a bucket.

    Attributes:
        members: the tensors, in the order of their blocks.
        codec: how numbers are written.
        num: parcels, that is chunks of each tensor.
        num_nodes: chunk p is row `place(p, num // num_nodes, num_nodes)` of the wire; 1 keeps the
            natural order.

    Raises:
        UnsupportedError: a member has another dtype than fp32, bf16, fp16 or fp64, or its chunks do
            not cover it.
    """

    members: tuple[Member, ...]
    codec: Codec
    num: int
    num_nodes: int = 1

    def __post_init__(self) -> None:
        wrong = [m.name for m in self.members if m.dtype not in DTYPES]
        if wrong:
            raise UnsupportedError(
                "only fp32, bf16, fp16 and fp64 can be quantized", "leave these out", wrong
            )
        short = [m.name for m in self.members if not 0 <= m.numel <= m.chunk * self.num]
        if short:
            raise UnsupportedError(
                f"{self.num} chunks do not cover every tensor", "use chunks of ⌈numel / num⌉", short
            )
        if self.num < 1 or self.num_nodes < 1 or self.num % self.num_nodes:
            raise UnsupportedError(
                f"{self.num} parcels cannot go to {self.num_nodes} equal nodes",
                "give every node equally many ranks",
            )

    def blocks_of(self, member: Member) -> int:
        """Blocks of one chunk of `member`."""
        return -(-member.chunk // self.codec.block)

    @property
    def first_blocks(self) -> tuple[int, ...]:
        """Where each member starts in a parcel, in blocks."""
        sizes = [self.blocks_of(member) for member in self.members]
        return tuple(itertools.accumulate(sizes, initial=0))[:-1]

    def places(self, number: int) -> tuple[tuple[int, int, int], ...]:
        """Where one member lies in a parcel, and where in a parcel that it has to itself.

        Returns:
            For codes, scales and lows: their first byte here, how many there are, and the first
            byte there.
        """
        codec, first = self.codec, self.first_blocks[number]
        blocks = self.blocks_of(self.members[number])
        here, there = self.num_blocks * codec.block_bytes, blocks * codec.block_bytes
        found = [(first * codec.block_bytes, there, 0)]
        for each in range(codec.num_params):
            at = here + 4 * (each * codec.num_slots(self.num_blocks) + first)
            found.append((at, 4 * blocks, there + 4 * each * codec.num_slots(blocks)))
        return tuple(found)

    @property
    def num_blocks(self) -> int:
        """Blocks of a parcel."""
        return sum(self.blocks_of(member) for member in self.members)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the wire: parcels, and bytes of each."""
        return self.num, self.codec.parcel_bytes(self.num_blocks)

    @property
    def num_local(self) -> int:
        """Parcels for each node."""
        return self.num // self.num_nodes
