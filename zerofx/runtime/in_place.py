"""Methods of sharded tensors that write in place: torch's `DTensor` takes no full values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from zerofx.errors import UnsupportedError
from zerofx.runtime.handles import reading
from zerofx.torch_private import tensors_in, without_parts

_RESHAPING = (
    *("as_strided_", "detach_", "requires_grad_", "resize_", "resize_as_", "set_", "share_memory_"),
    *("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"),
)
_ACROSS_ROWS = (
    *("addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_", "cumprod_", "cumsum_"),
    *("fill_diagonal_", "index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_"),
    *("masked_scatter_", "put_", "renorm_", "scatter_", "scatter_add_", "scatter_reduce_"),
    *("tril_", "triu_"),
)


def _is_in_place(name: str) -> bool:
    method = name.endswith("_") and not name.startswith("_") and name not in _RESHAPING
    return method or (name.startswith("__i") and name[3:-2] in vars(operator))


NAMES = tuple(name for name in dir(Tensor) if _is_in_place(name))
"""The methods of tensors that write values in place, operators among them."""


_CLEARED = "_zerofx_cleared"


def times_cleared(value: Tensor) -> list[int]:
    """How often a tensor was set to zero by `zero_`, through aliases too, since this was asked.

    It is counted in the list, which this tensor and its aliases have, and no other one.
    """
    return vars(value).setdefault(_CLEARED, [0])


def note_cleared(value: Tensor) -> None:
    """`value` was set to zero."""
    if (times := vars(value).get(_CLEARED)) is not None:
        times[0] += 1


def cleared_with(value: Tensor, alias: Tensor) -> None:
    """What clears `alias` clears `value`."""
    if (times := vars(value).get(_CLEARED)) is not None:
        vars(alias)[_CLEARED] = times


def _zero_(self: Any) -> Any:
    if not torch.compiler.is_compiling():
        note_cleared(self)
    return DTensor.zero_(self)


def methods() -> Iterator[tuple[str, Callable[..., Any]]]:
    """By name, those of a sharded tensor."""
    for name in NAMES:
        if name == "zero_":
            yield name, _zero_
        elif name != "copy_":
            yield name, _method(name)


def _method(name: str) -> Callable[..., Any]:
    plain = getattr(DTensor, name)

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        refuse_own(name, self, args, kwargs)
        if name in _ACROSS_ROWS:  # torch's may leave the tensor itself with other placements
            operands, named = full(args), {key: full(each) for key, each in kwargs.items()}
            return write_whole(self, lambda whole: getattr(whole, name)(*operands, **named))
        # Operands may be full values, the same on every rank.
        args = tuple(_like(self, each) for each in args)
        return plain(self, *args, **{key: _like(self, each) for key, each in kwargs.items()})

    return write


def _like(written: DTensor, operand: Any) -> Any:
    is_full = isinstance(operand, Tensor) and not isinstance(operand, DTensor) and operand.ndim
    return as_rows(written, everywhere(written, operand)) if is_full else operand


def refuse_own(what: Any, written: Tensor, *values: Any) -> None:
    """Refuse to write a rank's own values to what gradients go through: the ranks share it.

    Raises:
        UnsupportedError: names `what` writes.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    found = [value for value in tensors_in(values) if value.is_floating_point()]
    plain = [value for value in found if not isinstance(value, DTensor)]
    if any(value.requires_grad for value in plain) or (
        written.requires_grad and not all(_is_everywhere(written, value) for value in plain)
    ):
        raise UnsupportedError(
            f"{what} writes what is computed from plain tensors to a sharded tensor, and gradients "
            "are wanted",
            "write `penalty = penalty + loss` instead of `penalty += loss`; or, if no gradients "
            "are wanted, `with torch.no_grad():` around it",
        )


def _is_everywhere(like: Any, value: Tensor) -> bool:
    """Whether all ranks have the same; they find it together."""
    mesh, most, is_nan = like.device_mesh, [], value.isnan()
    numbers = torch.stack([value.masked_fill(is_nan, 0), is_nan.to(value.dtype)])
    for each in (numbers, -numbers):  # backends differ in what is larger than a NaN
        parts = [Partial("max")] * mesh.ndim
        most.append(full(DTensor.from_local(each.to(like.device), mesh, parts, run_check=False)))
    return torch.equal(most[0], -most[1])


def write_whole(written: Any, write: Callable[[Tensor], Any]) -> Any:
    """Let `write` write to the full value, of which each rank then takes its rows."""
    whole = full(written)
    if torch.is_grad_enabled():
        whole = whole.clone()  # autograd lets nothing be written to what a gather gives
    write(whole)
    return written.copy_(everywhere(written, whole))


def full(value: Any) -> Any:
    """The whole of a `DTensor`, and of each in a tuple; anything else as it is."""
    if isinstance(value, tuple):
        return tuple(full(each) for each in value)
    if not isinstance(value, DTensor):
        return value
    with reading(value.device_mesh):
        return value.full_tensor()


def everywhere(like: DTensor, whole: Tensor) -> DTensor:
    """A full value that every rank has, on the mesh and device of another tensor."""
    value = whole.to(like.device)
    return DTensor.from_local(value, like.device_mesh, replicated(like), run_check=False)


def as_rows(like: DTensor, value: DTensor) -> DTensor:
    """`value` in rows as those of `like`, if it has its shape; whole where ranks reduce `like`.

    An operation does so itself, but for rows that are fewer than ranks: torch refuses it.
    """
    rows = without_parts(like.placements)
    if value.shape != like.shape or list(value.placements) == rows:
        return value
    return value.redistribute(like.device_mesh, rows)


def write_parts(op: Any, written: DTensor, whole: DTensor) -> None:
    """Write a whole to a tensor that ranks have to reduce: of their new parts they make it again.

    It keeps its placements, as views of it do.

    Raises:
        UnsupportedError: numbers that no norm of parts can be.
    """
    mesh, placements = written.device_mesh, written.placements
    part = whole.redistribute(mesh, without_parts(placements)).to_local()
    for axis, how in enumerate(placements):
        if not isinstance(how, Partial) or how.reduce_op not in ("sum", "product"):
            continue  # of equal numbers their mean, the largest and the smallest are as they are
        if type(how) is not Partial and bool((whole.to_local() < 0).any()):
            raise UnsupportedError(
                f"{op} writes negative numbers to a norm of a sharded tensor",
                "write `norm = norm.log()` instead of `norm.log_()`, and so for other operations",
            )
        if mesh.get_local_rank(axis):
            part = torch.zeros_like(part) if how.reduce_op == "sum" else torch.ones_like(part)
    written._local_tensor.copy_(part)


def replicated(value: DTensor) -> list[Placement]:
    """Placements under which every rank has all of it."""
    return [Replicate()] * value.device_mesh.ndim
