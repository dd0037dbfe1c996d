"""Operations on `DTensor`s that torch refuses: with plain tensors, and those it has no rule for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map_only

from zerofx.torch_private.backwards import inside_graph
from zerofx.torch_private.foreach import lies_as
from zerofx.torch_private.handlers import (
    HANDLERS,
    Handler,
    added_up,
    has_parts,
    operation,
    operation_names,
    torchs_way,
)

_UPDATES = (
    *("add_", "addcdiv_", "addcmul_", "copy_", "div_", "eq_", "ge_", "gt_", "le_", "lerp_"),
    *("lt_", "mul_", "ne_", "sub_"),
)
"""What updates weights, row by row."""

_TORCHS = ("_amp_", "_foreach_", "_fused_", "_local_scalar_dense", "alias", "detach", "is_", "lift")
"""How the names of operations begin that are none of the user's, or have no values."""

_TORCHS_LIBRARIES = (
    *("_c10d_", "_dtensor", "_quantized", "aten", "c10d", "fsdp", "inductor", "mkldnn", "onednn"),
    *("prims", "profiler", "quantized", "static_runtime", "streams", "symm_mem", "zerofx"),
)
"""How the names of libraries begin whose operations know `DTensor`s, or never meet one."""

Made = Callable[[Any, Sequence[Tensor]], None]
"""Takes what an operation gave, and its operands."""


def answer_operations(mixed: Handler, whole: Handler, made: Made) -> None:
    """Have callbacks do what torch's `DTensor` leaves undone; they may answer `NotImplemented`.

    Args:
        mixed: called with an operation and its arguments, where `DTensor`s meet plain tensors of
            several elements, or gradients are wanted.
        whole: the same, where torch has no rule for an operation or for how operands lie, and where
            one draws random numbers, which by torch's rules are the same for the rows of all ranks.
        made: called with what an operation gave, and its operands.
    """
    for op in _operations():
        HANDLERS[op] = _answering(op, HANDLERS.get(op, torchs_way), mixed, whole, made)
    norms = HANDLERS[torch.ops.aten._foreach_norm.Scalar]

    def norm(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = norms(op, args, kwargs)
        made(found, args[0])
        return found

    HANDLERS[torch.ops.aten._foreach_norm.Scalar] = norm


def answer_other_libraries(mixed: Handler, whole: Handler, made: Made) -> None:
    """The same for operations of libraries that have been imported since this was called last."""
    for op in _operations_of_others():
        if op not in HANDLERS:
            HANDLERS[op] = _answering(op, torchs_way, mixed, whole, made)


def _answering(
    op: Any,
    otherwise: Handler,
    mixed: Handler,
    whole: Handler,
    made: Made,
) -> Handler:
    dispatcher, writes = DTensor._op_dispatcher, op._schema.is_mutable
    updates = op._schema.name.removeprefix("aten::") in _UPDATES
    draws = torch.Tag.nondeterministic_seeded in op.tags
    fills = op._schema.name == "aten::fill_"

    def answer(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if updates and _writes_in_place(args):
            op(*map(_local, args), **kwargs)
            return args[0]
        given = list(_tensors((*args, *kwargs.values())))
        plain = [value for value in given if not isinstance(value, DTensor)]
        found = NotImplemented
        if plain and dispatcher._allow_implicit_replication:
            if writes:  # to what is plain, maybe, which stays so
                found = whole(op, args, kwargs)
            if found is NotImplemented:
                args, kwargs = _replicated(plain, given, (args, kwargs))
        elif plain:
            written = kwargs.get("out", args[0]) if writes else None
            if _is_a_ranks_own(plain, given, written):
                found = mixed(op, args, kwargs)
            elif not writes:
                # A number of this rank's own may not scale its part of a sum alone.
                args = tuple(map(_added_up, args))
        if found is NotImplemented and (
            # torch fills the part of each rank with what is for all.
            draws or _only_writes(given, kwargs) or (fills and has_parts(args[0]))
        ):
            found = whole(op, args, kwargs)
        if found is NotImplemented:
            found = _by_rule(op, args, kwargs, otherwise, whole)
        made(found, given)
        return found

    return answer


def _by_rule(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rule: Handler, whole: Handler
) -> Any:
    try:
        return rule(op, args, kwargs)
    except RuntimeError as error:
        found = whole(op, args, kwargs) if _lacks_a_rule(error) else NotImplemented
        if found is NotImplemented:
            raise
        return found


def _operations() -> Iterator[Any]:
    for library, name, overload in operation_names():
        if library == "aten" and not name.startswith(_TORCHS):
            yield operation(library, name, overload)


def _operations_of_others() -> Iterator[Any]:
    return (operation(*names) for names in operation_names(but=_TORCHS_LIBRARIES))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """As `tensors_in`, in an eighth of its time: every operation comes here."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_a_ranks_own(plain: Sequence[Tensor], given: Sequence[Tensor], written: Any) -> bool:
    """Whether a result is: torch takes plain tensors of one element for the same on all ranks."""
    if any(value.numel() != 1 or value is written for value in plain):
        return True
    if torch.is_grad_enabled():
        return any(value.requires_grad for value in given)
    # So are gradients of what met plain tensors.
    return inside_graph() and written is None


def _replicated(plain: Sequence[Tensor], given: Sequence[Tensor], values: Any) -> Any:
    """`values` with plain tensors of symbolic sizes as replicated ones, which torch cannot make."""
    if not any(isinstance(size, torch.SymInt) for value in plain for size in value.shape):
        return values
    mesh = next(value.device_mesh for value in given if isinstance(value, DTensor))

    def replicated(value: Tensor) -> Tensor:
        if isinstance(value, DTensor):
            return value
        meta = TensorMeta(value.shape, value.stride(), value.dtype)
        spec = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
        return DTensor(value, spec, requires_grad=False)

    return tree_map_only(Tensor, replicated, values)


def _only_writes(given: Sequence[Tensor], kwargs: dict[str, Any]) -> bool:
    """Whether the one operand is where the result goes: torch writes each rank's as if whole."""
    return len(given) == 1 and kwargs.get("out") is given[0]


def _lacks_a_rule(error: Exception) -> bool:
    """Whether torch refused an operation, on all ranks alike, before it began."""
    said = (
        *("Sharding propagation failed", "sharding strategy", "not supported with DTensor"),
        "require placement changes",
    )
    return any(words in str(error) for words in said)


def _writes_in_place(args: tuple[Any, ...]) -> bool:
    """Whether local tensors meet their like, as in the step of an optimizer."""
    written = args[0]
    return (
        isinstance(written, DTensor)
        and not has_parts(written)
        and all(lies_as(written, other) for other in args[1:])
    )


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _added_up(value: Any) -> Any:
    # Those of other owners, of tensor parallelism say, are `DTensor`s and no more.
    ours = isinstance(value, DTensor) and type(value) is not DTensor
    return added_up(value) if ours else value
