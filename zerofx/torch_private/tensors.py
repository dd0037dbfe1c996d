"""Tensors, storages, autograd and fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo.eval_frame import OptimizedModule
from torch._guards import TracingContext
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import FakeCopyMode, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import (
    free_symbols,
    free_unbacked_symbols,
    statically_known_true,
)
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from zerofx.torch_private.handlers import HANDLERS, Handler
from zerofx.torch_private.nests import tensors_in

DispatchMode = TorchDispatchMode
"""Sees every operation below autograd."""

FakeMode = FakeTensorMode
"""Makes tensors without memory."""

is_made_of_tensors = is_traceable_wrapper_subclass
"""Whether a tensor's class wraps other tensors, as quantized weights do."""


PLAIN_RESULTS: Any = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a class of tensors of which operations give `Tensor`s."""


def fake_mode_of(values: Iterable[Any]) -> FakeTensorMode | None:
    """The mode that made the first fake tensor among `values`."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


def local_part(value: DTensor, kind: type[DTensor]) -> Tensor:
    """`value.to_local()`, differentiable twice: torch 2.11 forgets how it got to the gradient.

    Args:
        value: a parameter.
        kind: class of its gradient.
    """
    return local_parts([value], kind, lambda: None)[0]


def local_parts(
    values: Sequence[DTensor], kind: type[DTensor], before_backward: Callable[[], None]
) -> Sequence[Tensor]:
    """The local tensors of many parameters; cheaper than one by one.

    Args:
        values: the parameters.
        kind: class of their gradients.
        before_backward: called before gradients are handed on.
    """
    return _LocalParts.apply(kind, before_backward, *values) if values else ()


class _LocalParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kind: type[DTensor], before_backward: Callable[[], None], *values: DTensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.kind = kind
        ctx.before_backward = before_backward
        ctx.specs = [value._spec for value in values]
        # No views: torch 2.14 saves them as they are, and asks where they come from in backward;
        # the gather of a resident copy has then counted a write to their base.
        found = tuple(value._local_tensor.detach() for value in values)
        frozen = [f for f, value in zip(found, values, strict=True) if not value.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[DTensor | None, ...]:
        ctx.before_backward()
        pairs = zip(grads, ctx.specs, strict=True)
        return None, None, *(_wrapped(grad, spec, ctx.kind) for grad, spec in pairs)


def _wrapped(grad: Tensor | None, spec: Any, kind: type[DTensor]) -> DTensor | None:
    if grad is None:
        return None
    if not grad.requires_grad:
        # Not `kind(…)`: the empty constructor of `DTensor` takes longer than all else here.
        return DTensor.__new__(kind, grad, spec, requires_grad=False)
    # `create_graph=True`: a second backward has to come by.
    shape, stride = spec.tensor_meta.shape, spec.tensor_meta.stride
    made = DTensor.from_local(
        grad, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
    )
    made.__class__ = kind
    return made


def fake_shard(value: DTensor) -> Tensor:
    """The local tensor of a parameter, as AOTAutograd wants an input: fake, of fixed size."""
    mode = TracingContext.get().fake_mode
    assert mode is not None, "Dynamo made one for its backend"
    fake = mode.from_tensor(value._local_tensor.detach(), static_shapes=True)
    return fake.requires_grad_(value.requires_grad)


def stated_dtype(value: DTensor) -> torch.dtype:
    """The dtype that what is computed from `value` will claim.

    AOTAutograd wraps what a program returns as if it had the dtype that was traced.
    """
    meta = value._spec.tensor_meta
    return value.dtype if meta is None else meta.dtype


def reshape_in_place(take_place: Callable[[Any, Any], None]) -> None:
    """Let `value.t_()`, `value.squeeze_()` and the like put `value.t()`, … in its place.

    torch has no rule for them, or leaves the shape as it was.
    """

    def answering(other: Any) -> Handler:
        def answer(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
            value: DTensor = args[0]
            take_place(value, other(*args, **kwargs))
            return value

        return answer

    for name in ("squeeze", "t", "transpose", "unsqueeze"):
        packet = getattr(torch.ops.aten, f"{name}_")
        answer = answering(getattr(torch.ops.aten, name))
        HANDLERS.update((getattr(packet, overload), answer) for overload in packet.overloads())


def read_scalars_whole(gather: Callable[[DTensor], Tensor]) -> None:
    """Let `.item()`, `bool()` and the like of `DTensor`s give what `gather` makes of them.

    By itself torch gives each rank what its own shard says: the sum of its rows, say.
    """

    def read(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value: DTensor = args[0]
        there = all(placement.is_replicate() for placement in value.placements)
        return (value._local_tensor if there else gather(value)).item()

    HANDLERS[torch.ops.aten._local_scalar_dense.default] = read


def below_transforms(value: Any) -> Any:
    """What `value` is outside the `torch.func` transforms that are under way."""
    while isinstance(value, Tensor) and functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


def inside_transform() -> bool:
    """Whether a `torch.func` transform is under way."""
    return functorch.peek_interpreter_stack() is not None


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """The user's module behind the wrapper that `torch.compile` returns."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def with_local(value: DTensor, local: Tensor) -> DTensor:
    """`value` with another local tensor, which stays on its device; `from_local` would move it."""
    return DTensor(local, value._spec, requires_grad=False)


def symbols_of(value: Any) -> list[str]:
    """Names of the shape symbols in a fake tensor's metadata, sorted."""
    if isinstance(value, (torch.SymInt, Tensor)):
        return sorted(str(symbol) for symbol in free_symbols(value))
    if isinstance(value, (tuple, list)):
        return sorted({symbol for item in value for symbol in symbols_of(item)})
    return []


def settled(value: Any) -> Any:
    """A symbolic size in the symbols that stand for it by now; anything else as it is.

    Inductor binds an input to the symbol that it began as, which another one may have replaced.
    """
    if not isinstance(value, torch.SymInt) or value.node.expr == value.node._expr:
        return value
    return value.node.shape_env.create_symintnode(value.node.expr, hint=value.node.hint)


def size_hint(size: int | torch.SymInt) -> int:
    """The extent that a symbolic size had when it was traced; 1 if it depends on data.

    `int(size)` would guard on it, so that every other size compiles anew.
    """
    if isinstance(size, int):
        return size
    hint: int | None = size.node.hint
    return 1 if hint is None else int(hint)


def fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and devices, and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def forget_results(value: Any) -> None:
    """Let nothing but its owners know a fake tensor, nor any other that its mode made.

    The mode remembers by weak references; `Module.to` and its like swap tensors without any alone.
    """
    if isinstance(value, FakeTensor):
        value.fake_mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def with_values(fake: FakeTensor, compute: Callable[[], Tensor]) -> Tensor:
    """A fake tensor like `fake` that knows its values; single ones may be read.

    Args:
        fake: made by an operation without tensors as arguments.
        compute: does the operation.
    """
    with unset_fake_temporarily():
        real = compute()
    mode = fake.fake_mode
    return mode.fake_tensor_converter.from_real_tensor(mode, real, make_constant=True)


def concrete_copy(values: Any, mode: FakeTensorMode) -> Any:
    """The same nest on new fake tensors, in the sizes that symbols stand for by now.

    Full values stand for `DTensor`s, and `None` for what depends on data.
    """

    def copied(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return value.node.hint
        if isinstance(value, DTensor):
            with mode:
                return torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if not isinstance(value, Tensor):
            return value
        shape, stride = ([copied(n) for n in sizes] for sizes in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    return _pytree.tree_map(copied, values)


def has_unknown_size(values: Any) -> bool:
    """Whether the shape of a fake tensor depends on what others hold."""
    return any(free_unbacked_symbols(value) for value in tensors_in(values))


def fake_copy(value: Any, mode: FakeTensorMode) -> Any:
    """A deep copy, of a model for example, whose tensors are fake; tied ones stay tied."""
    with FakeCopyMode(mode):
        return copy.deepcopy(value)


def same_shape(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have one shape whatever their symbols stand for; nothing is guarded."""
    sizes = zip(one.shape, other.shape, strict=False)
    return one.ndim == other.ndim and all(statically_known_true(a == b) for a, b in sizes)


def shares_storage(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors, fake ones too, use the same storage object."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def storage_key(value: Tensor) -> int:
    """Names a tensor's storage, also one without memory, while it lives."""
    return value.untyped_storage()._cdata


def generator_key(generator: Any) -> int:
    """Names a generator while it lives; operations see other Python objects than callers."""
    return generator._cdata


def memory_of(value: Any) -> int | None:
    """Names the storage of what Dynamo saw at a node.

    `None` for a `DTensor`, a sparse tensor or no tensor.
    """
    value = below_transforms(value)
    strided = isinstance(value, Tensor) and value.layout == torch.strided
    return storage_key(value) if strided and not isinstance(value, DTensor) else None
