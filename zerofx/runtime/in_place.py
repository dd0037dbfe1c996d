"""Methods of sharded tensors that write in place, where torch's `DTensor` does not do as a tensor.

On CPU it draws the same numbers for the rows of every rank, and it takes no full values.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

_RESHAPING = (
    *("as_strided_", "detach_", "requires_grad_", "resize_", "resize_as_", "set_", "squeeze_"),
    *("swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
)
_RANDOM = (
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
    *("random_", "uniform_"),
)


def _is_in_place(name: str) -> bool:
    method = name.endswith("_") and not name.startswith("_") and name not in _RESHAPING
    return method or (name.startswith("__i") and name[3:-2] in vars(operator))


NAMES = tuple(name for name in dir(Tensor) if _is_in_place(name))
"""The methods of tensors that write values in place, operators among them."""


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """By name, those of a sharded tensor."""
    for name in NAMES:
        if name != "copy_" and hasattr(DTensor, name):
            yield name, _draws(name) if name in _RANDOM else _takes_full(name)


def _draws(name: str) -> Callable[..., Any]:
    """Every rank draws all values, as one process does; rank 0's win, as at initialisation."""
    plain = getattr(DTensor, name)

    def draw(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        with torch.no_grad():
            whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
            getattr(whole, name)(*map(full, args), **{key: full(kwargs[key]) for key in kwargs})
            drawn = distribute_tensor(whole, self.device_mesh, self.placements)
        return DTensor.copy_(self, drawn)

    return draw


def _takes_full(name: str) -> Callable[..., Any]:
    """Operands may be full values, the same on every rank."""
    plain = getattr(DTensor, name)

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        args = tuple(_like(self, each) for each in args)
        return plain(self, *args, **{key: _like(self, kwargs[key]) for key in kwargs})

    return write


def writes_back(write: Callable[..., Any]) -> Callable[..., Any]:
    """The same for rows that are copies: it writes to what they were taken from."""

    def write_back(self: Any, *args: Any, **kwargs: Any) -> Any:
        write(self, *args, **kwargs)
        self._write_back()
        return self

    return write_back


def _like(written: Any, operand: Any) -> Any:
    is_full = isinstance(operand, Tensor) and not isinstance(operand, DTensor) and operand.ndim
    return written._everywhere(operand) if is_full else operand


def full(value: Any) -> Any:
    """The whole of a `DTensor`; anything else as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value
