"""Full values that code outside of programs holds: which parameter each is, and what became of it.

Such code is what Dynamo leaves to Python, and the caller of a forward that returns a weight. What
it writes to a full value is lost, and a second read in a backward would be another tensor than the
one that an `autograd.Function` kept in forward; of a plain parameter it is the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from zerofx.errors import UnsupportedError
from zerofx.runtime.ownership import OWNER
from zerofx.runtime.params import ParamState
from zerofx.torch_private import PLAIN_RESULTS, kept_by_running_function, shares_storage

EDIT_OUTSIDE = (
    "edit parameters outside the forward, under torch.no_grad(), through model.parameters(); "
    "what a first batch sets, by one forward of the plain model"
)
"""The remedy where a forward modifies values of parameters."""


class FullValue(Tensor):
    """A full value whose `.data` hides no writes; what is computed from it is a plain tensor."""

    __torch_function__ = PLAIN_RESULTS
    _parameter: str

    @property
    def data(self) -> Tensor:
        """As `detach()`: writes to it count as writes to this."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not shares_storage(value, self):  # `w.data = w.data.to(x.device)` may be nothing
            raise _written([self._parameter])

    def set_(self, *args: Any, **kwargs: Any) -> Tensor:
        """As it is; to itself is nothing, which `register_parametrization` does first."""
        to_itself = len(args) == 1 and args[0] is self and not kwargs
        return self if to_itself else super().set_(*args, **kwargs)

    @property
    def grad(self) -> Tensor | None:
        """As it is."""
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:  # pyright: ignore
        raise UnsupportedError(
            "a backward writes the gradient of a weight itself, which no other rank would know",
            "return it from the backward",
            [self._parameter],
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.as_subclass(Tensor).__deepcopy__(memo)


_GRAD: Any = Tensor.grad


@dataclasses.dataclass
class _Value:
    """One of them.

    Attributes:
        tensor: while somebody holds it.
        counter: has its version counter, and none of its memory.
        version: when it was handed out, or renewed.
    """

    tensor: TensorWeakRef
    counter: Tensor | None
    version: int = 0

    def is_written(self) -> bool:
        return self.counter is not None and self.counter._version != self.version


class HandedOut:
    """Those of one model."""

    def __init__(self) -> None:
        self._values: dict[ParamState, list[_Value]] = {}

    def add(self, state: ParamState, value: Tensor) -> None:
        """Code outside of programs gets `value`, the full value of a parameter.

        Raises:
            UnsupportedError: it wrote to an earlier one.
        """
        self.refuse_written([state])
        self._values.setdefault(state, []).append(_value(state, value))

    def kept_for(self, state: ParamState) -> Tensor | None:
        """The value that the `autograd.Function` whose backward runs now kept of a parameter."""
        values = [each.tensor() for each in self._values.get(state, ())]
        if not values:
            return None
        kept = kept_by_running_function()
        return next((each for each in kept if any(each is value for value in values)), None)

    def renew(self, state: ParamState) -> None:
        """What wrote to a resident copy was a gather."""
        for each in self._values.get(state, ()):
            if each.counter is not None:
                each.version = each.counter._version

    def refuse_written(self, states: Iterable[ParamState] | None = None) -> None:
        """Raise if a value was written to; forget those that are gone.

        Args:
            states: of the parameters to look at; by default all.

        Raises:
            UnsupportedError: names the parameters.
        """
        looked_at = list(self._values if states is None else states)
        given = {state: self._values.pop(state, []) for state in looked_at}
        written = [
            state.spec.name
            for state, values in given.items()
            if any(each.is_written() for each in values)
        ]
        if written:
            raise _written(written)
        for state, values in given.items():
            if left := [each for each in values if each.tensor() is not None]:
                self._values[state] = left


def hand_out(param: Tensor, value: Tensor) -> None:
    """`HandedOut.add` for a sharded parameter."""
    state: ParamState = vars(param)[OWNER].state
    state.domain.session.handed_out.add(state, value)


def taking_tensors(run: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`run`, for whose time full values among the inputs are plain tensors."""
    places = [at for at, value in enumerate(example_inputs) if isinstance(value, FullValue)]
    if not places:
        return run

    def plain(*args: Any) -> Any:
        values = [args[at] for at in places]
        for value in values:
            value.__class__ = Tensor
        try:
            return run(*args)
        finally:
            for value in values:
                value.__class__ = FullValue

    return plain


def _written(names: Iterable[str]) -> UnsupportedError:
    return UnsupportedError(
        "values of parameters that the forward returned, or that it read in code which Dynamo left "
        "to Python, are modified in place; the edit is lost (Embedding(max_norm=…) does it too)",
        EDIT_OUTSIDE,
        dict.fromkeys(names),
    )


def _value(state: ParamState, value: Tensor) -> _Value:
    if type(value) is Tensor:  # not so while models are traced without memory
        made: Any = value
        made.__class__ = FullValue
        made._parameter = state.spec.name
    reference = TensorWeakRef(value)
    # Writes to a resident copy are writes to this rank's rows too: they last.
    lasts = shares_storage(value, state.shard)
    if lasts or value.is_inference() or not isinstance(value, FullValue):
        return _Value(reference, None)
    counter = value.detach()
    counter.data = value.new_empty(0)
    return _Value(reference, counter, value._version)
