"""`ShardedParameter`: what a sharded model has in the place of an `nn.Parameter`."""

from __future__ import annotations

import collections
import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from zerofx.errors import UnsupportedError

OWNER = "_zerofx_owner"
"""The attribute of a parameter that holds its `Owner`."""


class Owner:
    """Keeps a parameter's state alive with the parameter, for a backward that outlives the model.

    It does not travel in pickles of the parameter alone.
    """

    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, ()


class ShardedParameter(DTensor):
    """A `DTensor` whose `data` can be assigned: copies of it are plain `DTensor`s.

    Averages of weights and optimizers by hand write `param.data = value`, which torch does below
    Python: a `DTensor` would keep its old shard, and nobody would notice.
    """

    @property
    def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The parameter without autograd, in the same memory."""
        return Tensor.data.__get__(self)  # pyright: ignore

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy values in: a `DTensor`, or full values, the same on every rank.

        Raises:
            UnsupportedError: they have another shape or dtype.
        """
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UnsupportedError(
                f"a parameter of shape {tuple(self.shape)} and {self.dtype} is assigned data of "
                f"shape {tuple(value.shape)} and {value.dtype}",
                "assign a new nn.Parameter to the module's attribute; the next forward shards it",
            )
        if not isinstance(value, DTensor):
            everywhere = [Replicate()] * self.device_mesh.ndim
            value = value.detach().to(self.device)
            value = DTensor.from_local(value, self.device_mesh, everywhere, run_check=False)
        with torch.no_grad():
            self.copy_(value)

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> ShardedParameter:
        # AOTAutograd compares the classes of fake and real inputs.
        made = DTensor.__tensor_unflatten__(*args)
        made.__class__ = ShardedParameter
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        """The same memory, gradient and attributes under torch's own class."""
        plain = nn.Parameter(self.detach(), self.requires_grad)
        vars(plain).update(vars(self))
        plain.grad = self.grad
        return plain
