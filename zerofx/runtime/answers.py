"""Operations on sharded tensors that torch's `DTensor` refuses: they are of whole tensors here.

The loop asks for them, and code of a forward that Dynamo leaves to Python: averages of weights, a
penalty that is added to a loss, a weight that a loss is computed with, quantiles. All ranks come to
them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

from zerofx.errors import UnsupportedError
from zerofx.runtime.handles import reading, sessions_on
from zerofx.runtime.in_place import (
    as_rows,
    everywhere,
    full,
    refuse_own,
    replicated,
    write_parts,
)
from zerofx.runtime.parameter import Sharded, local_tensor
from zerofx.torch_private import (
    arguments_by_name,
    fake_mode_of,
    has_parts,
    is_mixing,
    map_tensors,
    tensors_in,
    without_parts,
)


def ours_in(values: Any) -> list[DTensor]:
    """The `DTensor`s in a nest, if they are of a sharded model; none if they are of others."""
    found = [value for value in tensors_in(values) if isinstance(value, DTensor)]
    return found if any(map(sessions_on, {value.device_mesh for value in found})) else []


def with_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `op` gives of sharded tensors and plain ones: a rank's own, as that which is plain.

    Gradients of what is sharded are means over ranks, as those of a forward.

    Raises:
        UnsupportedError: it writes to a sharded tensor what has a gradient; or it is traced, and
            gradients are wanted.
    """
    sharded, given = ours_in((args, kwargs)), tensors_in((args, kwargs))
    if not sharded:
        return NotImplemented
    trains = torch.is_grad_enabled() and any(value.requires_grad for value in given)
    if trains and fake_mode_of(given):
        raise UnsupportedError(
            f"{op}, which Dynamo traces outside of the model, mixes sharded and plain tensors, and "
            "its result needs gradients",
            "compile the model, and not the loop around it; or take full values: "
            "param.full_tensor()",
        )
    written = ours_in(_written(op, args, kwargs))
    for value in written:
        refuse_own(op, value, args, kwargs)
    if written:
        return _write_rows(op, args, kwargs)
    found = _of_full_values(op, args, kwargs)
    if trains and any(value.is_floating_point() for value in tensors_in(found)):
        _lay_out_gradients(sharded)
    return found


def of_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `op` gives of sharded tensors by whole ones, where torch has no rule for rows.

    What is drawn is what one process draws: rank 0's numbers are everybody's. Where Dynamo traces a
    model only shapes are asked for, as its programs compute with full values.
    """
    sharded = ours_in((args, kwargs))
    draws, writes = torch.Tag.nondeterministic_seeded in op.tags, op._schema.is_mutable
    if _are_traced(sharded):
        if draws or not is_mixing() or ours_in(_written(op, args, kwargs)):
            return NotImplemented
        found = op(*map_tensors(_shape_of, args), **map_tensors(_shape_of, kwargs))
        return found if writes else map_tensors(lambda value: everywhere(sharded[0], value), found)
    if not sharded:
        return NotImplemented
    if writes:
        return _write_rows(op, args, kwargs)

    def laid_out(value: Tensor) -> Tensor:
        if value.is_sparse:
            return value
        return _of_first_rank(sharded[0], value) if draws else everywhere(sharded[0], value)

    return map_tensors(laid_out, _of_full_values(op, args, kwargs))


def of_library(answer: Callable[..., Any]) -> Callable[..., Any]:
    """`answer`, one of the above, for operations of other libraries.

    Raises:
        UnsupportedError: one writes to more than its first operand.
    """

    def answer_or_refuse(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op._schema.is_mutable and not _writes_first(op) and ours_in((args, kwargs)):
            raise UnsupportedError(
                f"{op} writes to its operands, of which some are sharded, and torch has no rule "
                "for how rows go through it",
                "zerofx.OwnerOptimizer(params, its class, lr=…), if it is the step of an "
                "optimizer: that works on whole tensors, of which each rank owns some "
                "(docs/owners.md); or give it value.full_tensor(), or this rank's rows: "
                "value.to_local()",
            )
        return answer(op, args, kwargs)

    return answer_or_refuse


def like_a_parameter(found: Any, given: Sequence[Tensor]) -> None:
    """Let what was computed take writes and gradients as parameters do, whose own are rows."""
    sharded = [value for value in given if isinstance(value, Sharded)]
    if not sharded:
        return
    if torch.is_grad_enabled() and not _are_traced(sharded):
        _lay_out_gradients([value for value in sharded if value.is_leaf])
    for value in tensors_in(found):
        if type(value) is DTensor:
            value.__class__ = Sharded


def _are_traced(sharded: Sequence[DTensor]) -> bool:
    return any(type(local_tensor(value)) is not Tensor for value in sharded)


def _of_full_values(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return op(*map_tensors(_whole, args), **map_tensors(_whole, kwargs))


def _writes_first(op: Any) -> bool:
    """Whether `op` writes to its first operand, and to no other."""
    return [at for at, given in enumerate(op._schema.arguments) if given.is_write] == [0]


def _written(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The operands that `op` writes to: tensors, and lists of them."""
    operands = arguments_by_name(op, args, kwargs)
    names = [given.name for given in op._schema.arguments if given.is_write]
    return {name: operands[name] for name in names if name in operands}


def _write_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let `op` write to wholes of what it writes to, of which ranks take their rows."""
    written = _written(op, args, kwargs)
    if len(op._schema.returns) not in (0, len(written)):  # it gives something else
        return NotImplemented
    draws = torch.Tag.nondeterministic_seeded in op.tags
    anew = draws or all(given.is_out for given in op._schema.arguments if given.is_write)
    wholes: list[tuple[DTensor, Tensor]] = []

    def whole_of(value: Tensor) -> Tensor:
        if not isinstance(value, DTensor):
            return value
        wholes.append((value, _empty(value) if anew else full(value.detach())))
        return wholes[-1][1]

    operands = arguments_by_name(op, args, kwargs) | map_tensors(whole_of, written)
    _of_full_values(op, (), operands)
    if any(whole.shape != value.shape for value, whole in wholes):
        return NotImplemented
    for value, whole in wholes:
        _take_rows(op, value, (_of_first_rank if draws else everywhere)(value, whole))
    found = list(written.values()) if op._schema.returns else [None]
    return found[0] if len(found) == 1 else tuple(found)


def _take_rows(op: Any, written: DTensor, value: DTensor) -> None:
    if has_parts(written):
        write_parts(op, written, value)
    else:
        written.copy_(as_rows(written, value))


def _empty(like: DTensor) -> Tensor:
    """Of a whole of which nothing stays."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _of_first_rank(like: DTensor, whole: Tensor) -> DTensor:
    """`whole` as rank 0 has it, in rows as those of `like` where it has its shape."""
    rows = without_parts(like.placements) if whole.shape == like.shape else replicated(like)
    return distribute_tensor(whole, like.device_mesh, rows)


def _whole(value: Tensor) -> Any:
    # Below autograd torch 2.11 gathers nothing that requires gradients.
    return full(value.detach()) if isinstance(value, DTensor) else value


def _shape_of(value: Tensor) -> Any:
    return _empty(value) if isinstance(value, DTensor) else value


def _lay_out_gradients(values: Sequence[DTensor]) -> None:
    """Let the gradient of each of `values` lie as it does, whatever ranks compute of it."""
    for value in values:
        hooks = value._backward_hooks or {}
        if value.requires_grad and not any(isinstance(hook, _LaidOut) for hook in hooks.values()):
            value.register_hook(_LaidOut(value))


class _LaidOut:
    """Lays a gradient out as what it is of; takes a plain one for this rank's, and their mean."""

    __torch_unserializable__ = True
    """Copies of a parameter get their own, where they need it."""

    def __init__(self, value: DTensor) -> None:
        self._mesh = value.device_mesh
        self._placements = without_parts(value.placements)

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        lies_so = isinstance(grad, DTensor) and list(grad.placements) == self._placements
        if grad is None or lies_so:  # none where nothing asked for it
            return grad
        with reading(self._mesh):
            if isinstance(grad, DTensor):
                return grad.redistribute(self._mesh, self._placements)
            # Divided afterwards, a gradient of the mean would be divided twice.
            parts = [Partial("avg")] * self._mesh.ndim
            dense = grad.to_dense() if grad.is_sparse else grad
            mine = DTensor.from_local(dense, self._mesh, parts, run_check=False)
            return mine.redistribute(self._mesh, self._placements)
