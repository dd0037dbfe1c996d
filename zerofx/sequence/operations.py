"""What a node of Dynamo's graph does, as far as its name and the kernels behind it tell."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from zerofx.torch_private import DispatchMode, FakeMode, arguments_by_name, is_mutable, tensors_in

_HOMES: tuple[Any, ...] = (torch, F, operator, torch.special, torch.linalg)
_ALSO_POINTWISE = frozenset(
    (
        *("_to_copy", "alias", "copy_", "detach", "lift_fresh", "log_sigmoid_forward"),
        *("fill", "fill_", "masked_fill_", "empty_like", "full_like", "ones_like", "zeros_like"),
        *("bernoulli", "bernoulli_", "native_dropout", "rand_like", "randn_like"),
        *("exponential_", "geometric_", "normal_", "uniform_"),
    )
)
"""What torch has not tagged so."""


def name_of(node: fx.Node) -> str:
    """The name of a method, or of a function of torch's own; empty for what others wrote."""
    if node.op == "call_method":
        return str(node.target)
    name = str(getattr(node.target, "__name__", ""))
    is_known = any(getattr(home, name, None) is node.target for home in _HOMES)
    return name if node.op == "call_function" and is_known else ""


def is_torchs(node: fx.Node) -> bool:
    """Whether torch's own formula gives the gradient.

    So it is of attributes, some of which torch 2.15 has Dynamo write as operators of ATen.
    """
    name = str(getattr(node.target, "__name__", ""))
    known = node.target is getattr or getattr(torch.ops.aten, name, None) is node.target
    return known or bool(name_of(node))


def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Do what the node does."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def argument(node: fx.Node, place: int, name: str, default: Any) -> Any:
    """An argument that may be given by its place or by its name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What an operation runs.

    Attributes:
        ops: operators below autograd, in order.
        written: places of the operands that it writes to.
        is_seen_otherwise: whether it gives an operand another shape, as `unsqueeze_` does.
        is_random: whether it draws random numbers.
    """

    ops: tuple[Any, ...]
    written: tuple[int, ...]
    is_seen_otherwise: bool
    is_random: bool

    @property
    def is_pointwise(self) -> bool:
        """Whether an element of the result takes only the operands' elements at its place."""
        return all(
            torch.Tag.pointwise in op.tags or op.overloadpacket.__name__ in _ALSO_POINTWISE
            for op in self.ops
            if op.namespace != "prim"  # questions about operands
        )


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        self.is_random |= _draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def kernels_of(
    node: fx.Node, arguments: Callable[[], tuple[Any, Any]], mode: FakeMode
) -> Kernels | None:
    """Run an operation on fake operands; `None` if that fails, as where it reads values."""
    recorder = _Recorder()
    try:
        args, kwargs = arguments()
        given = tensors_in((args, kwargs))
        before = [value._version for value in given]
        shapes = [(value.shape, value.stride()) for value in given]
        with mode, torch.no_grad(), recorder:
            call(node, args, kwargs)
    except Exception:  # whatever torch has against fake operands
        return None
    lists = any(map(_writes_list, recorder.ops))
    written = [at for at, value in enumerate(given) if lists or value._version != before[at]]
    after = [(value.shape, value.stride()) for value in given]
    return Kernels(tuple(recorder.ops), tuple(written), after != shapes, recorder.is_random)


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws random numbers: attention counts as random, whether it drops or not."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    drops = any(each.name == "dropout_p" for each in op._schema.arguments)
    return not drops or bool(arguments_by_name(op, args, kwargs).get("dropout_p"))


def may_write(node: fx.Node, name: str, kernels: Kernels | None) -> bool:
    """Whether an operation writes to an operand, or may do so for all that is known of it."""
    if hasattr(node.target, "overloadpacket"):
        return is_mutable(node.target)
    if kernels is not None:
        return bool(kernels.written)
    in_place = name.endswith("_") and not name.endswith("__")
    return not name or in_place or name == "setitem"


def _writes_list(op: Any) -> bool:
    """`torch._foreach_…_`, which fake tensors do not count."""
    return is_mutable(op) and "foreach" in op.overloadpacket.__name__
