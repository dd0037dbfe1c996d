"""Operations between `DTensor`s and plain tensors, which torch refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zerofx.torch_private.foreach import lies_as
from zerofx.torch_private.handlers import HANDLERS, Handler, torchs_way

_ARITHMETIC = (
    *("add", "addcdiv", "addcmul", "copy", "div", "lerp", "maximum", "minimum", "mul", "rsub"),
    *("sub", "where"),
)
_COMPARISONS = ("allclose", "eq", "equal", "ge", "gt", "isclose", "le", "lt", "ne")


def compute_mixed(compute: Handler, compare: Handler) -> None:
    """Have callbacks do what averages and comparisons of weights ask for.

    Args:
        compute: called with an operation and its arguments, where `DTensor`s meet plain tensors of
            several elements; what it answers with `NotImplemented` goes torch's way.
        compare: the same, for operations that have no gradient.
    """
    _meet(_ARITHMETIC, compute)
    _meet(_COMPARISONS, compare)


def _meet(names: Iterable[str], compute: Handler) -> None:
    dispatcher = DTensor._op_dispatcher

    def meet(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op._schema.is_mutable and _writes_in_place(args):
            op(*map(_local, args), **kwargs)
            return args[0]
        if not dispatcher._allow_implicit_replication and any(map(_is_plain, args)):
            found = compute(op, args, kwargs)
            if found is not NotImplemented:
                return found
        return torchs_way(op, args, kwargs)

    HANDLERS.update((op, meet) for op in _overloads(names))


def _overloads(names: Iterable[str]) -> Iterator[Any]:
    for name in itertools.chain.from_iterable((name, f"{name}_") for name in names):
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            if not overload.endswith("out"):
                yield getattr(packet, overload)


def _writes_in_place(args: tuple[Any, ...]) -> bool:
    """Whether local tensors meet their like, as in the step of an optimizer."""
    written = args[0]
    return (
        isinstance(written, DTensor)
        and not any(how.is_partial() for how in written._spec.placements)
        and all(lies_as(written, other) for other in args[1:])
    )


def _local(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() != 1
