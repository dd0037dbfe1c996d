"""Functions of many tensors over `DTensor`s: torch counts no writes, or has no rule, or is slow."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _foreach_supported_types as _OF_OPTIMIZERS
from torch.utils._foreach_utils import _foreach_supported_types as _OF_CLIPPING

from zerofx.torch_private.handlers import HANDLERS, operation, operation_names

_BOUNDS = {
    "maximum": "clamp_min",
    "maximum_": "clamp_min_",
    "minimum": "clamp_max",
    "minimum_": "clamp_max_",
}
"""Functions that take numbers for lists, and tensors alone for one, by those that take both."""


def count_foreach_writes(
    cleared: Callable[[Tensor], None], copied_among: Callable[[Sequence[Any]], list[Any]]
) -> None:
    """Let functions that write in place raise version counters, as those of one tensor do.

    Where operands lie alike they run on the local tensors; elsewhere, for plain operands (torch has
    no rule for them), and for those functions that torch has no rule for, one by one.

    Args:
        cleared: called with every tensor that `_foreach_zero_` has set to zero.
        copied_among: gives the views that are memory of their own; lists of them go one by one.
    """

    def write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _write(op, args, kwargs, together=not copied_among(args[0]))

    def clear(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        write(op, args, kwargs)
        for tensor in args[0]:
            cleared(tensor)

    HANDLERS.update((op, write) for op in _in_place("_foreach_"))
    HANDLERS[torch.ops.aten._foreach_zero_.default] = clear


def compute_pointwise() -> None:
    """Let functions that return lists take plain tensors beside `DTensor`s, as optimizers do."""
    HANDLERS.update((op, _compute) for op in _pointwise())


def update_local_tensors() -> None:
    """Let fused optimizers run on local tensors; torch's way costs 6 µs a parameter more."""
    HANDLERS.update((op, _update) for op in _in_place("_fused_"))


def foreach_by_default(*kinds: type[DTensor]) -> None:
    """Let optimizers and clipping take `foreach` on GPUs, as they do for `DTensor` itself."""
    for supported in (_OF_OPTIMIZERS, _OF_CLIPPING):
        supported.extend(kinds)


def find_overflow_of_all() -> None:
    """Let scalers of losses find on all ranks what one finds.

    torch asks along the axes that split the first gradient; here along all that split any, small
    groups first, so that what one of several models finds gets to all ranks of the others.
    """
    check = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default

    def look(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grads, found, inverse = args
        op([getattr(grad, "_local_tensor", grad) for grad in grads], found, inverse, **kwargs)
        groups = {group.group_name: group for grad in grads for group in _splitting(grad)}
        for group in sorted(groups.values(), key=lambda each: (each.size(), each.group_name)):
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)

    HANDLERS[check] = look


def _splitting(grad: Tensor) -> list[dist.ProcessGroup]:
    """The groups along the axes that split a gradient."""
    if not isinstance(grad, DTensor):
        return []
    places, mesh = enumerate(grad.placements), grad.device_mesh
    return [mesh.get_group(axis) for axis, how in places if not how.is_replicate()]


def _ops(prefix: str) -> Iterator[tuple[str, Any]]:
    for library, name, overload in operation_names():
        if library == "aten" and name.startswith(prefix) and not overload.endswith("out"):
            yield name, operation(library, name, overload)


def _in_place(prefix: str) -> Iterator[Any]:
    return (op for name, op in _ops(prefix) if name.endswith("_"))


def _pointwise() -> Iterator[Any]:
    others = ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm")
    return (op for name, op in _ops("_foreach_") if not name.endswith("_") and name not in others)


def _compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    given = next(arg for arg in args if isinstance(arg, Sequence))
    if _lie_alike(args):
        made = op(*map(_local, args), **kwargs)
        return [_laid_out(one, value) for one, value in zip(given, made, strict=True)]
    name: str = op._schema.name.removeprefix("aten::_foreach_")
    function = getattr(torch, _BOUNDS.get(name, name))
    made: list[Tensor] = []
    for place in range(len(given)):
        operands, named = _scaled(name, [_at(place, arg) for arg in args], kwargs)
        made.append(function(*operands, **named))
    return made


def _laid_out(like: Tensor, local: Tensor) -> Tensor:
    return DTensor(local, like._spec, requires_grad=False) if isinstance(like, DTensor) else local


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, together: bool) -> None:
    written: Sequence[Tensor] = args[0]
    if together and _lie_alike(args):
        op(_apart(written), *map(_local, args[1:]), **kwargs)
    else:
        name = op._schema.name.removeprefix("aten::_foreach_")
        for place, tensor in enumerate(written):
            _write_one(name, tensor, [_at(place, arg) for arg in args[1:]], kwargs)
    _count(written)


def _update(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    params, grads, *rest = args
    grads = [_laid_as(param, grad) for param, grad in zip(params, grads, strict=True)]
    if not all(_meet(params, values) for values in (grads, *rest)):
        raise RuntimeError("gradients or an optimizer's state do not lie as their parameters")
    kwargs = {name: _local(value) for name, value in kwargs.items()}
    written, given = _apart(params), [_local(values) for values in (grads, *rest)]
    ordered = [list(map(_in_order_of, written, values)) for values in given]
    op(written, *ordered, **kwargs)
    for value, used in zip(itertools.chain(*given), itertools.chain(*ordered), strict=True):
        if used is not value:
            value.copy_(used)
    _count(params)


def _in_order_of(param: Tensor, value: Tensor) -> Tensor:
    """A copy, where numbers lie in another order: kernels go through memory from end to end."""
    if value.shape != param.shape or value.stride() == param.stride():
        return value
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


def _count(written: Sequence[Tensor]) -> None:
    counted = [each for each in written if not each.is_inference()]
    torch.autograd.graph.increment_version(counted)


def _laid_as(param: Tensor, grad: Tensor) -> Tensor:
    if lies_as(param, grad) or not isinstance(param, DTensor) or not isinstance(grad, DTensor):
        return grad
    return grad.redistribute(param.device_mesh, param.placements)


def _write_one(name: str, tensor: Tensor, operands: list[Any], kwargs: dict[str, Any]) -> None:
    operands, kwargs = _scaled(name, [tensor, *operands], kwargs)
    getattr(tensor, _BOUNDS.get(name, name))(*operands[1:], **kwargs)


def _scaled(
    name: str, operands: list[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """As functions of one tensor take the factor, which those of many may be given by place."""
    if name.rstrip("_") in ("addcmul", "addcdiv") and len(operands) > 3:
        return operands[:3], {"value": operands[3]}
    return operands, kwargs


def _at(place: int, operand: Any) -> Any:
    return operand[place] if isinstance(operand, Sequence) else operand


def _lie_alike(args: tuple[Any, ...]) -> bool:
    """Whether local tensors of the first list meet their like in the others."""
    written, *others = (arg for arg in args if isinstance(arg, Sequence))
    layouts = {each._spec.placements for each in written if isinstance(each, DTensor)}
    return all(how.is_shard() or how.is_replicate() for each in layouts for how in each) and all(
        _meet(written, operands) for operands in others
    )


def _meet(written: Sequence[Tensor], operands: Sequence[Any]) -> bool:
    return all(lies_as(one, other) for one, other in zip(written, operands, strict=False))


def lies_as(one: Tensor, other: Any) -> bool:
    """Whether the local tensor of one operand meets the other's in place; numbers do with all."""
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        mine, others = one._spec, other._spec
        if mine is others:
            return True
        alike = mine.mesh == others.mesh and mine.placements == others.placements
        return alike and one.shape == other.shape
    if not isinstance(other, Tensor) or (not other.ndim and type(other) is Tensor):
        return True  # a number
    return isinstance(one, DTensor) is isinstance(other, DTensor)


def _apart(written: Sequence[Tensor]) -> list[Tensor]:
    """Local tensors with counters of their own.

    On GPUs foreach functions count writes of what they are given, and autograd would refuse a shard
    that it saved.
    """
    return [each._local_tensor.data if isinstance(each, DTensor) else each for each in written]


def _local(operand: Any) -> Any:
    if isinstance(operand, Sequence):
        return [each._local_tensor if isinstance(each, DTensor) else each for each in operand]
    return operand.full_tensor() if isinstance(operand, DTensor) else operand
