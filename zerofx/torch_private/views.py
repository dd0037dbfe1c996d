"""Operations that give views, and those that write: of `DTensor`s some views are copies."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from zerofx.torch_private.handlers import HANDLERS, Handler, torchs_way
from zerofx.torch_private.nests import tensors_in

_COMPOSED = torch._C.DispatchKey.CompositeImplicitAutograd

Looking = Callable[[Tensor, Any, Callable[[Tensor], Any]], None]
"""Takes a tensor, what an operation gave as a view of it, and what gives that of another tensor."""

Writing = Callable[[Tensor, Callable[[], Any], Sequence[Tensor]], Any]
"""Takes a tensor, what writes to it, and its operands; gives what that gives."""


def follow_views(
    copied_among: Callable[[Sequence[Any]], list[Any]], look: Looking, write: Writing
) -> None:
    """Call back at operations that have a handler.

    Args:
        copied_among: gives the views that are memory of their own.
        look: called with views.
        write: called instead of an operation that writes to one of these.
    """
    alias = torch.ops.aten.alias.default
    handlers = {alias: torchs_way, **HANDLERS}
    for op, handler in handlers.items():
        if not isinstance(op, torch._ops.OpOverload):
            continue
        if _gives_view(op):
            HANDLERS[op] = _looking(handler, look)
        elif written := list(_written(op)):
            HANDLERS[op] = _writing(handler, written, copied_among, write)
    # Autograd has done it by then; torch 2.11 comes to it inside of handlers, and has no rule.
    HANDLERS.setdefault(torch.ops.aten.detach_.default, lambda op, args, kwargs: args[0])


def is_traced(value: Tensor) -> bool:
    """Whether a tensor stands for another one, in a trace."""
    return isinstance(value, (FakeTensor, FunctionalTensor))


def _gives_view(op: Any) -> bool:
    """Whether an operation gives a view always; composed ones come as what they are made of."""
    expected, given = op._schema.arguments, op._schema.returns
    if not expected or expected[0].alias_info is None or op.has_kernel_for_dispatch_key(_COMPOSED):
        return False
    if op._schema.is_mutable:
        return torch.Tag.inplace_view in op.tags
    return any(each.alias_info is not None for each in given)


def _written(op: Any) -> Iterator[tuple[int, str]]:
    """Places and names of the tensors that an operation writes to."""
    for place, expected in enumerate(op._schema.arguments):
        if expected.is_write and str(expected.type) in ("Tensor", "Optional[Tensor]"):
            yield place, expected.name


def _looking(otherwise: Handler, look: Looking) -> Handler:
    def answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = otherwise(op, args, kwargs)
        look(args[0], found, lambda whole: op(whole, *args[1:], **kwargs))
        return found

    return answer


def _writing(
    otherwise: Handler,
    written: Sequence[tuple[int, str]],
    copied_among: Callable[[Sequence[Any]], list[Any]],
    write: Writing,
) -> Handler:
    writes_first = [at for at, _ in written] == [0]

    def answer(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: Any = args[:1]
        if not writes_first:
            given = [args[at] if at < len(args) else kwargs.get(name) for at, name in written]
        rows = copied_among(given)
        if not rows:
            return otherwise(op, args, kwargs)
        found = functools.partial(otherwise, op, args, kwargs)
        operands = tensors_in((args, kwargs))
        for each in rows:
            found = functools.partial(write, each, found, operands)
        return found()

    return answer
