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
from zerofx.runtime.ownership import owner_of
from zerofx.torch_private import added_up, fake_mode_of, inside_transform, local_part, storage_key


class Sharded(DTensor):
    """A `DTensor` that can be written to, as what is computed from it."""

    @property
    def data(self) -> Tensor:
        """The tensor without autograd, in the same memory; writes to it count as writes to this."""
        if torch.compiler.is_compiling():
            return _writable(super().detach(), Sharded)
        return _shown(self)

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
                "assign a new nn.Parameter to the module's attribute; the next forward shards it",
            )
        if (owner := owner_of(self)) is not None:
            owner.leave()
        with torch.no_grad():
            self.copy_(value)

    def copy_(self, other: Tensor, non_blocking: bool = False) -> Tensor:
        """Copy values in: of a `DTensor`, or full ones, the same on every rank."""
        refuse_own("copy_", self, other)
        value = other if isinstance(other, DTensor) else everywhere(self, other)
        refuse_foreign(value, self.device_mesh)
        return super().copy_(as_rows(self, value), non_blocking)

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
        return _alias(self, type(self))

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same, in which draws are one process's: `nn.init.orthogonal_` begins so."""
        made = super().new_empty(*args, **kwargs)
        return made if torch.compiler.is_compiling() else _writable(made, Sharded)

    def __getitem__(self, index: Any) -> Tensor:
        found = super().__getitem__(index)
        return self._seen(found, lambda whole: whole[index]) if in_place.is_basic(index) else found

    def _seen(self, found: Any, view: Callable[[Tensor], Any]) -> Any:
        """What torch gives for a view, such that writes to it are writes to this.

        Args:
            found: a tensor, or a tuple of tensors; `DTensor` may have copied rows for it.
            view: gives the same of the full tensor.
        """
        if isinstance(found, tuple):
            parts = enumerate(cast(tuple[Tensor, ...], found))
            return tuple(self._seen(part, lambda whole, i=i: view(whole)[i]) for i, part in parts)
        trains = found.requires_grad and torch.is_grad_enabled()
        seen = found if trains else found.detach()
        # Views of parameters are not written to; torch 2.14 adds up parts of ranks in `detach`.
        if (trains and self.is_leaf) or self._is_seen_by(seen):
            return _writable(seen, Sharded)
        copied = _writable(seen.clone(), Copied)
        copied._whole, copied._view = self, view
        return copied

    def _is_seen_by(self, view: Tensor) -> bool:
        """Whether writes to what torch gives for a view are writes to this."""
        return storage_key(local_tensor(view)) == storage_key(local_tensor(self))

    def __setitem__(self, index: Any, value: Any) -> None:
        refuse_own("an assignment to an index", self, value)
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
        whole: str = super()._stable_hash_for_caching()
        return f"{whole} {tuple(local_tensor(self).shape)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if not self.is_leaf:
            return super().__deepcopy__(memo)
        # torch's takes a `DTensor` whose rows do not begin a buffer for one that has a storage.
        made = plain(self, super().detach().clone())
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(made), memo))
        if isinstance(self, ShardedParameter):
            return _writable(made, ShardedParameter)
        made.grad = copy.deepcopy(self.grad, memo)
        return _writable(made, Sharded)


class ShardedParameter(Sharded):
    """A parameter."""

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
    """What a view is where `DTensor` copied rows: methods that write in place write back."""

    _whole: Sharded
    _view: Callable[[Tensor], Tensor]

    def detach(self) -> Tensor:
        made: Any = super().detach()
        made._whole, made._view = self._whole, self._view
        return made

    data = Sharded.data.getter(detach)  # pyright: ignore[reportIncompatibleMethodOverride]

    def _is_seen_by(self, view: Tensor) -> bool:
        return False

    def _write_back(self) -> None:
        rows = full(self)
        write_whole(self._whole, lambda whole: self._view(whole).copy_(rows))


def _writes_back(write: Callable[..., Any]) -> Callable[..., Any]:
    def write_back(self: Copied, *args: Any, **kwargs: Any) -> Any:
        write(self, *args, **kwargs)
        self._write_back()
        return self

    return write_back


def _views(name: str) -> Callable[..., Any]:
    plain = getattr(DTensor, name)
    # Dynamo does not follow `super()` in torch's method.
    traced = torch.unflatten if name == "unflatten" else plain

    def look(self: Sharded, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced(self, *args, **kwargs)
        found = plain(self, *args, **kwargs)
        return self._seen(found, lambda whole: getattr(whole, name)(*args, **kwargs))

    return look


def _unflatten_as(kind: type[Sharded]) -> Any:
    plain: Callable[..., DTensor] = DTensor.__tensor_unflatten__
    return staticmethod(lambda *args: _writable(plain(*args), kind))


KINDS: tuple[type[Sharded], ...] = (Sharded, ShardedParameter, Copied)
# AOTAutograd compares the classes of fake and real inputs.
for _kind in KINDS:
    setattr(_kind, "__tensor_unflatten__", _unflatten_as(_kind))  # noqa: B010 (typed otherwise)

_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
_VIEWING = (
    *("chunk", "diagonal", "flatten", "hsplit", "movedim", "narrow", "permute", "reshape"),
    *("select", "split", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind"),
    *("unflatten", "unfold", "unsqueeze", "view", "view_as", "vsplit"),
)
for _name in _VIEWING:
    setattr(Sharded, _name, _views(_name))
for _name, _method in in_place.methods():
    setattr(Sharded, _name, _method)
for _name in in_place.NAMES:
    setattr(Copied, _name, _writes_back(getattr(Sharded, _name)))


def local_tensor(value: Tensor) -> Tensor:
    """The local shard of a value that is a `DTensor`; no communication, no autograd."""
    return cast(DTensor, value)._local_tensor


def plain(value: DTensor, made: Tensor) -> Tensor:
    """`made`, a tensor of torch's own class, with what else `value` has."""
    if not isinstance(value, Copied):  # rows do not bring along what they were taken from
        vars(made).update(vars(value))
    return made.requires_grad_(value.requires_grad)


def _writable(value: Any, kind: type[Sharded]) -> Any:
    value.__class__ = kind
    return value


@torch.compiler.disable()
def _shown(whole: Sharded) -> Tensor:
    data: Tensor = _alias(whole, Sharded)
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
    return alias


def make_writable(param: Any) -> None:
    """Turn a parameter that is a `DTensor` into a `ShardedParameter`: the object stays the same."""
    param.__class__ = ShardedParameter


def take_place(param: Any, made: Any) -> None:
    """Let a `DTensor` lie where `made` does, and as it does: the object stays the same."""
    _DATA.__set__(param, made)
    param._local_tensor, param._spec = made._local_tensor, made._spec
