"""Codes of frozen parameters, made once and sent again (qwZ)."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerofx.ir.parcels import Parcels
from zerofx.runtime.params import ParamState


@dataclasses.dataclass(frozen=True)
class _Codes:
    """This rank's chunk of a parameter as codes, and the versions of the parameter they say."""

    codes: Tensor
    scales: Tensor
    versions: tuple[int, int, int]


class FrozenCodes:
    """This rank's codes of parameters that need no gradient.

    They serve in whatever bucket the parameter travels, while its versions are those they were made
    of. What they cost is the size of the codes.
    """

    def __init__(self) -> None:
        self._codes: weakref.WeakKeyDictionary[ParamState, _Codes] = weakref.WeakKeyDictionary()

    def load(self, states: Sequence[ParamState | None], parcels: Parcels, parcel: Tensor) -> bool:
        """Put a parcel together from codes at hand.

        Args:
            states: whose chunks it holds, in the order of its members.
            parcels: what lies where in it.
            parcel: `uint8[parcel_bytes]`, written if this returns True.

        Returns:
            Whether codes of all members are at hand and say what the parameters are now.
        """
        found = [self._current(state) for state in states]
        if any(each is None for each in found):
            return False
        _, scales = _sections(parcels, parcel)
        scales[:, parcels.num_blocks :] = 0
        for kept, (codes, its_scales) in zip(found, _members(parcels, parcel), strict=True):
            assert kept is not None
            codes.copy_(kept.codes)
            its_scales.copy_(kept.scales)
        return True

    def save(self, states: Sequence[ParamState | None], parcels: Parcels, parcel: Tensor) -> None:
        """Keep the codes of those members that are frozen; see `load`."""
        for state, (codes, scales) in zip(states, _members(parcels, parcel), strict=True):
            if state is not None and not state.param.requires_grad:
                self._codes[state] = _Codes(codes.clone(), scales.clone(), state.versions())

    def drop(self, state: ParamState) -> None:
        """The parameter changed in a way that leaves no trace."""
        self._codes.pop(state, None)

    def _current(self, state: ParamState | None) -> _Codes | None:
        kept = self._codes.get(state) if state is not None else None
        if state is None or kept is None:
            return None
        if state.param.requires_grad or kept.versions != state.versions():
            self.drop(state)
            return None
        return kept


def _sections(parcels: Parcels, parcel: Tensor) -> tuple[Tensor, Tensor]:
    """Codes `[blocks, block_bytes]`, and scales and lows `f32[1 or 2, slots]`."""
    codec, end = parcels.codec, parcels.num_blocks * parcels.codec.block_bytes
    scales = parcel[end:].view(torch.float32).view(codec.num_params, -1)
    return parcel[:end].view(-1, codec.block_bytes), scales


def _members(parcels: Parcels, parcel: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Sections of each member."""
    codes, scales = _sections(parcels, parcel)
    for member, first in zip(parcels.members, parcels.first_blocks, strict=True):
        blocks = slice(first, first + parcels.blocks_of(member))
        yield codes[blocks], scales[:, blocks]
