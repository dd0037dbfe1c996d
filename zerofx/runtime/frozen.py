"""Codes of frozen parameters, made once and sent again (qwZ)."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from zerofx.runtime.params import ParamState

if TYPE_CHECKING:
    from zerofx.runtime.quantized import Gathering


class FrozenCodes:
    """This rank's codes of parameters that need no gradient.

    They serve in whatever bucket the parameter travels, while its versions are those they were made
    of. What they cost is the size of the codes.
    """

    def __init__(self) -> None:
        self._codes: weakref.WeakKeyDictionary[ParamState, tuple[Tensor, tuple[int, int, int]]] = (
            weakref.WeakKeyDictionary()
        )

    def load(self, states: Sequence[ParamState | None], kernels: Gathering, parcel: Tensor) -> bool:
        """Put a parcel together from codes at hand.

        Args:
            states: whose chunks it holds, in the order of its members.
            kernels: what lies where in it.
            parcel: `uint8[parcel_bytes]`, written if this returns True.

        Returns:
            Whether codes of all members are at hand and say what the parameters are now.
        """
        found = [codes for state in states if (codes := self._current(state)) is not None]
        if len(found) < len(states):
            return False
        kernels.together(found, parcel)
        return True

    def save(self, states: Sequence[ParamState | None], kernels: Gathering, parcel: Tensor) -> None:
        """Keep the codes of those members that are frozen; see `load`."""
        if not any(map(_is_frozen, states)):
            return
        for state, codes in zip(states, kernels.apart(parcel[None]), strict=True):
            if state is not None and _is_frozen(state):
                self._codes[state] = codes[0], state.versions()

    def drop(self, state: ParamState) -> None:
        """The parameter changed in a way that leaves no trace."""
        self._codes.pop(state, None)

    def _current(self, state: ParamState | None) -> Tensor | None:
        if state is None or state not in self._codes:
            return None
        codes, versions = self._codes[state]
        if not _is_frozen(state) or versions != state.versions():
            self.drop(state)
            return None
        return codes


def _is_frozen(state: ParamState | None) -> bool:
    return state is not None and not state.param.requires_grad
