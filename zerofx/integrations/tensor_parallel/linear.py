"""Linear layers of which every rank holds some rows or columns (Megatron-LM, §3)."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerofx.sequence.cuts import Place
from zerofx.torch_private import for_parts, joined, own_part, sum_of_parts


@dataclasses.dataclass(frozen=True)
class Cut:
    """Which part of a weight each rank holds.

    Attributes:
        dim: of the weight: 0 for outputs, 1 for inputs.
        sections: sizes along it, each of which is cut into equal parts: a fused matrix of queries,
            keys and values has three.
    """

    dim: int
    sections: tuple[int, ...]

    def places(self, rank: int, size: int) -> Tensor:
        """Indices along `dim` of what `rank` of `size` ranks holds."""
        parts = torch.arange(sum(self.sections)).split(self.sections)
        return torch.cat([part.chunk(size)[rank] for part in parts])

    def join(self, parts: list[Tensor]) -> Tensor:
        """The whole of what the ranks hold."""
        places = torch.cat([self.places(rank, len(parts)) for rank in range(len(parts))])
        return torch.cat(parts, self.dim).index_select(self.dim, places.argsort())


class ColumnLinear(nn.Linear):
    """Holds some outputs; its input is whole."""

    place: Place
    joins: bool

    def forward(self, input: Tensor) -> Tensor:
        at = self.place
        part = F.linear(for_parts(input, at.group), self.weight, self.bias)
        return joined(part, at.group, at.rank, at.size) if self.joins else part


class RowLinear(nn.Linear):
    """Holds some inputs; its output is whole."""

    place: Place
    cuts: bool

    def forward(self, input: Tensor) -> Tensor:
        at = self.place
        part = own_part(input, at.group, at.rank, at.size) if self.cuts else input
        output = sum_of_parts(F.linear(part, self.weight), at.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class TailLinear(nn.Linear):
    """Whole; the last outputs go where ranks compute parts without another linear between.

    So do rotary keys of multi-head latent attention (DeepSeek-V2, §2.1).
    """

    place: Place
    tail: int

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        tail = for_parts(output[..., -self.tail :], self.place.group)
        return torch.cat((output[..., : -self.tail], tail), -1)


def cut_outputs(linear: nn.Linear, cut: Cut, place: Place, *, joins: bool) -> None:
    """Keep this rank's outputs; the parameters stay the same objects."""
    kept = cut.places(place.rank, place.size).to(linear.weight.device)
    linear.weight.data = linear.weight.data.index_select(0, kept)
    if linear.bias is not None:
        linear.bias.data = linear.bias.data.index_select(0, kept)
    linear.out_features = len(kept)
    linear.__class__ = ColumnLinear
    assert isinstance(linear, ColumnLinear)
    linear.place, linear.joins = place, joins


def cut_inputs(linear: nn.Linear, cut: Cut, place: Place, *, cuts: bool) -> None:
    """Keep this rank's inputs; the bias stays whole."""
    kept = cut.places(place.rank, place.size).to(linear.weight.device)
    linear.weight.data = linear.weight.data.index_select(1, kept)
    linear.in_features = len(kept)
    linear.__class__ = RowLinear
    assert isinstance(linear, RowLinear)
    linear.place, linear.cuts = place, cuts


def sum_tail(linear: nn.Linear, tail: int, place: Place) -> None:
    """Sum gradients of the last `tail` outputs."""
    linear.__class__ = TailLinear
    assert isinstance(linear, TailLinear)
    linear.place, linear.tail = place, tail
