"""What a sharded parameter knows of the model that it is of."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.utils.weak import TensorWeakRef

if TYPE_CHECKING:
    from zerofx.runtime.params import ParamState

OWNER = "_zerofx_owner"
"""The attribute of a parameter that holds its `Owner`."""
SHOWN = "_zerofx_shown"
"""The attribute of a parameter, and of what has its memory, that holds its `Owner` weakly."""


class Owner:
    """Keeps a parameter's state alive with the parameter, for a backward that outlives the model.

    It does not travel in pickles of the parameter alone.
    """

    def __init__(self, state: Any) -> None:
        self.state = state
        self._seen: list[TensorWeakRef] = []

    def show(self, data: Tensor) -> None:
        """`data` is the parameter's, without autograd."""
        self._seen = [each for each in self._seen if each() is not None] + [TensorWeakRef(data)]

    def leave(self) -> None:
        """The parameter gets other data: what showed it keeps the values so far."""
        for each in self._seen:
            if (data := each()) is not None:
                cast(Any, data)._local_tensor = cast(Any, data)._local_tensor.clone()
        self._seen.clear()

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, ()


def owner_of(value: Tensor) -> Owner | None:
    """`None` for copies and gradients."""
    found = vars(value).get(OWNER)
    return found if isinstance(found, Owner) else None


def own(param: Tensor, state: Any) -> None:
    """`state` is that of `param`."""
    vars(param)[OWNER] = owner = Owner(state)
    vars(param)[SHOWN] = weakref.ref(owner)


def states_of(params: Iterable[Tensor], among: Iterable[ParamState]) -> list[ParamState]:
    """Those of `among` that are states of `params`."""
    wanted = set(map(id, params))
    return [state for state in among if id(state.param) in wanted]


def shown_with(value: Tensor, alias: Tensor) -> None:
    """`alias` has the memory of `value`; it does not keep a parameter's state alive."""
    if (shown := vars(value).get(SHOWN)) is not None:
        vars(alias)[SHOWN] = shown


def shown_by(value: Tensor) -> Owner | None:
    """The owner of the parameter that a tensor has the memory of, if it is alive."""
    shown = vars(value).get(SHOWN)
    return None if shown is None else shown()
