"""`ShardedParameter`: what a sharded model has in the place of an `nn.Parameter`.

torch's `DTensor` loses some writes in silence: `param.data = value` is done below Python and leaves
the shard as it was, and rows that lie on several ranks are copies (`param[0].zero_()`,
`param.chunk(4)[1].fill_(1)`). Here both arrive, also in `param.data` and `param.grad`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from zerofx.errors import UnsupportedError
from zerofx.ir.ops import UNSHARD
from zerofx.runtime import in_place
from zerofx.runtime.foreign import refuse_foreign
from zerofx.runtime.in_place import as_rows, everywhere, full, refuse_own, write_whole
from zerofx.runtime.ownership import SHOWN, owner_of, shown_by, shown_with
from zerofx.torch_private import added_up, fake_mode_of, inside_transform, local_part


class Sharded(DTensor):
    """A `DTensor` that can be written to, as what is computed from it."""

    # Of a view for which `DTensor` copied rows: what it is a view of, and how that is taken.
    _whole: Sharded | None = None
    _view: Callable[[Tensor], Tensor]

    @property
    def data(self) -> Tensor:
        """The tensor without autograd, in the same memory; writes to it count as writes to this."""
        if torch.compiler.is_compiling():
            return _writable(super().detach(), Sharded)
        return _shown(self, Sharded)

    @data.setter
    @torch.compiler.disable(reason="a parameter's data is assigned")
    def data(self, value: Tensor) -> None:
        """Copy values in: a `DTensor`, or full values, the same on every rank.

        Raises:
            UnsupportedError: they have another shape or dtype.
        """
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UnsupportedError(
                f"a tensor of shape {tuple(self.shape)} and {self.dtype} is assigned data of "
                f"shape {tuple(value.shape)} and {value.dtype}",
                "assign a new nn.Parameter to the module's attribute; the next compiled forward "
                "shards it, or zerofx.shard(model, config)",
            )
        if (owner := owner_of(self)) is not None:
            owner.leave()
        with torch.no_grad():
            self.copy_(value)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy values in: of a `DTensor`, or full ones, the same on every rank."""
        refuse_own("copy_", self, other)
        value = other if isinstance(other, DTensor) else everywhere(self, torch.as_tensor(other))
        refuse_foreign(value, self.device_mesh)
        if self._whole is not None:
            return write_rows(self, Sharded.copy_, value)
        return super().copy_(as_rows(self, value), non_blocking)

    def share_memory_(self) -> Tensor:
        """Move this rank's rows to memory that processes share."""
        local_tensor(self).share_memory_()
        return self

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The same; Dynamo may trace it under a `torch.func` transform, where torch's fails."""
        local = local_tensor(self)
        if fake_mode_of([local]) is not None and inside_transform():
            return local.view_as(local)
        return super().to_local(grad_placements=grad_placements)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole; its gradient is the mean over ranks of theirs, which torch takes for alike."""
        if grad_placements is None and self.requires_grad and torch.is_grad_enabled():
            mean = [Partial("avg")] * self.device_mesh.ndim
            return DTensor.full_tensor(added_up(self), grad_placements=mean)
        return super().full_tensor(grad_placements=grad_placements)

    def detach(self) -> Tensor:
        """The same; `nn.Parameter(…)` asks for a value of the same class."""
        if torch.compiler.is_compiling():
            return _writable(super().detach(), type(self))
        return _shown(self, type(self))

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same, in which draws are one process's: `nn.init.orthogonal_` begins so."""
        made = super().new_empty(*args, **kwargs)
        return made if torch.compiler.is_compiling() else _writable(made, Sharded)

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse_own("an assignment to an index", self, value)
        if self._whole is not None:
            write_rows(self, Sharded.__setitem__, index, value)
            return
        write_whole(self, lambda whole: whole.__setitem__(full(index), full(value)))

    def numpy(self, *, force: bool = False) -> Any:
        """The whole, on every rank; read-only, as what is written to an array would be lost."""
        array = full(self).numpy(force=force)
        array.setflags(write=False)
        return array

    def tolist(self) -> Any:
        """The numbers of the whole, on every rank."""
        return full(self.detach()).tolist()

    def __format__(self, spec: str) -> str:
        # `f"{norm:.3f}"` of what clipping returns, as of a plain tensor's number.
        return format(self.item(), spec) if spec and not self.ndim else super().__format__(spec)

    def _stable_hash_for_caching(self) -> str:
        # By torch's a rank would take code that another one compiled for its own number of rows.
        return f"{super()._stable_hash_for_caching()} {tuple(local_tensor(self).shape)}"

    def __create_chunk_list__(self) -> Any:
        # DCP, which is about to read or to write; what has no rows would not see it.
        if (owner := shown_by(self)) is not None:
            owner.state.domain.session.forget_values(owner.state)
        return super().__create_chunk_list__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        # torch's takes a `DTensor` whose rows do not begin a buffer for one that has a storage.
        made = plain(self, super().detach().clone())
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(made), memo))
        if isinstance(self, ShardedParameter):
            return _writable(made, type(self))
        made.grad = copy.deepcopy(self.grad, memo)
        return _writable(made, Sharded)


class ShardedParameter(Sharded):
    """A parameter; one that was of a user's class is of both (`user_classes`)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Not that of the user's class, which ran for it already."""

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The same, gathered as in a forward."""
        owner = owner_of(self)
        trains = self.requires_grad and torch.is_grad_enabled() and grad_placements is None
        if owner is None or not trains:
            return super().full_tensor(grad_placements=grad_placements)
        layout = owner.state.spec.layout
        whole: Tensor = UNSHARD(local_part(self, Sharded), self.shape, layout.handle, None)
        return whole.clone() if layout.resident else whole

    @property
    def grad(self) -> Tensor | None:
        """The mean over all ranks, sharded as the parameter is."""
        grad = _GRAD.__get__(self)
        return _writable(grad, Sharded) if type(grad) is DTensor else grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _GRAD.__set__(self, None)


class Copied(Sharded):
    """What a view is where `DTensor` copied rows: it shows the values that are there now."""

    _versions: tuple[int, ...]

    @property
    def _local_tensor(self) -> Tensor:
        # Of what Dynamo makes of its inputs nothing is known.
        if (whole := self._whole) is not None and self._versions != _versions(whole):
            self._versions = _versions(whole)
            show_rows(self, self._view(full(whole)))
        return _LOCAL.__get__(self)

    @_local_tensor.setter
    def _local_tensor(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _LOCAL.__set__(self, value)

    def _is_view(self) -> bool:
        return False  # torch would trace it as the view that it is not


def _versions(whole: Sharded) -> tuple[int, ...]:
    """What differs after somebody edited what a view is of."""
    shown = shown_by(whole)
    counted = (whole, local_tensor(whole), whole if shown is None else shown.state.param)
    return tuple(-1 if each.is_inference() else each._version for each in counted)


@torch.no_grad()
def show_rows(rows: Any, there: Tensor) -> None:
    """Let rows that `DTensor` copied have the values that are there in the full tensor."""
    made = as_rows(rows, everywhere(rows, there.clone()))
    _LOCAL.__set__(rows, local_tensor(made))


def copied(rows: Any, whole: Sharded, view: Callable[[Tensor], Tensor], kind: type[Sharded]) -> Any:
    """`rows` as a view of `whole`; it gets memory of its own, as it has part of what was gathered.

    Args:
        rows: what `DTensor` gave for a view.
        whole: what it is a view of.
        view: gives the same of the full tensor.
        kind: its class.
    """
    local = local_tensor(rows).clone()
    rows.__class__ = kind
    rows._whole, rows._view, rows._versions = whole, view, _versions(whole)
    _LOCAL.__set__(rows, local)
    return rows


def write_rows(rows: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    """Let a method write to rows that `DTensor` copied, and to what they are of."""
    made: Any = None

    def write(whole: Tensor) -> None:
        nonlocal made
        there = rows._view(whole)
        made = _writable(everywhere(rows, there.clone()), Sharded)
        method(made, *args, **kwargs)
        there.copy_(full(made))
        show_rows(rows, there)

    write_whole(rows._whole, write)
    # For autograd `rows` are as they were.
    return copied(made, rows._whole, rows._view, Sharded) if made.requires_grad else rows


_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
_LOCAL: Any = vars(DTensor)["_local_tensor"]
_TIES = (SHOWN, "_whole", "_view", "_versions")
"""Attributes that say whose values a tensor shows."""


def local_tensor(value: Tensor) -> Tensor:
    """The local shard of a value that is a `DTensor`; no communication, no autograd."""
    return cast(DTensor, value)._local_tensor


def plain(value: DTensor, made: Tensor) -> Tensor:
    """`made`, a tensor of torch's own class, with what else `value` has."""
    vars(made).update(each for each in vars(value).items() if each[0] not in _TIES)
    return made.requires_grad_(value.requires_grad)


def _writable(value: Any, kind: type[Sharded]) -> Any:
    """`value`, a `DTensor`, as one of `kind`: the object stays the same."""
    value.__class__ = kind
    return value


@torch.compiler.disable()
def _shown(whole: Sharded, kind: type[Sharded]) -> Tensor:
    data: Tensor = _alias(whole, kind)
    if (owner := owner_of(whole)) is not None:
        owner.show(data)
    return data


@torch.compiler.disable()
def _alias(whole: Sharded, kind: type[Sharded]) -> Any:
    """`whole` without autograd; writes to the local tensor of either count as writes to both.

    torch gives it a counter of its own (`dcp.load` writes to local tensors of `state_dict()`), and
    makes none in inference mode.
    """
    with torch.inference_mode(whole.is_inference()):
        alias = _writable(DTensor.detach(whole), kind)
        if alias.placements == whole.placements:  # torch 2.14 adds up what ranks have parts of
            alias._local_tensor = local_tensor(whole).detach()
    in_place.cleared_with(whole, alias)
    shown_with(whole, alias)
    if whole._whole is None:
        return alias
    return copied(alias, _alias(whole._whole, Sharded), whole._view, Copied)


def take_place(param: Any, made: Any) -> None:
    """Let a `DTensor` lie where `made` does, and as it does: the object stays the same."""
    _DATA.__set__(param, made)
    param._local_tensor, param._spec = made._local_tensor, made._spec
