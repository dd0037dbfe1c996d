"""The vocabulary: every zerofx op, declared once, with its fake kernel.

Markers appear while a model is traced and say nothing about when or how bytes move:

* `unshard(shard, size, layout, dtype)`: the full value of a parameter;
* `reduce_grad(grad, shard, layout)`: the mean over all data-parallel ranks of a full gradient, of
  which each rank keeps what it owns. It is registered as the gradient of `unshard`.

Passes replace them by program nodes, which only a program holds:

* `unshard_start(shards, layout, codec, keep)` → `unshard_wait(pending, shard, size, dtype)` →
  `free(full, layout)`;
* `keep(full, shard, layout)` instead of `free`: the next backward may use the value;
* `keep_shard(full, shard, layout)` before either: this rank keeps its secondary shard of the value
  (hpZ), from which gathers inside the node are served until the parameter changes;
* `reduce_start(grads, shards, layout, codecs)` → `reduce_wait(pending, shard, dtype)`;
* `sync_buffers(buffers, layout)`: rank 0's values, in place.

A start moves a bucket: one or more parameters of one layout, its members. Each member is waited for
by a node of its own, which names it by its shard. `size` is the global shape, `layout` an integer
handle (see `zerofx.ir.spec.Layout`).

ZeRO++ sends codes instead of numbers: `codec` names how a gather writes them, `codecs` how the two
hops of a reduction do (see `zerofx.ir.parcels.Codec`). Shards are coded as they are at rest, and
decoded to the dtype of the full value; without a codec numbers travel as they are. With `keep` a
rank also keeps, as its secondary shard, its part of the codes that arrive.

Mixed precision is part of what these mean. A full value has the dtype that its marker or wait
states, by default the shard's; shards are cast before they travel. Gradients are cast to the
layout's `reduce_dtype` (by default they travel as they are), averaged in at least fp32 (in it by
a backend's own reductions), rounded to it, and end in the dtype that their wait states, by default
the shard's.

Eager kernels of the markers are registered by
`zerofx.runtime.markers`; program nodes are bound by `zerofx.frontend.lower`, or interpreted by
`zerofx.sim.lockstep`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx

# torch.library is untyped.
_torch_library: Any = torch.library
_LIBRARY = _torch_library.Library("zerofx", "DEF")
for _schema in (
    "unshard(Tensor shard, SymInt[] size, int layout, ScalarType? dtype=None) -> Tensor",
    "reduce_grad(Tensor grad, Tensor shard, int layout) -> Tensor",
    "unshard_start(Tensor[] shards, int layout, str? codec=None, bool keep=False) -> Tensor",
    "unshard_wait(Tensor pending, Tensor shard, SymInt[] size, ScalarType? dtype=None) -> Tensor",
    "free(Tensor full, int layout) -> ()",
    "keep(Tensor full, Tensor shard, int layout) -> ()",
    "keep_shard(Tensor full, Tensor shard, int layout) -> ()",
    "reduce_start(Tensor[] grads, Tensor[] shards, int layout, str[]? codecs=None) -> Tensor",
    "reduce_wait(Tensor pending, Tensor shard, ScalarType? dtype=None) -> Tensor",
    "sync_buffers(Tensor[] buffers, int layout) -> ()",
):
    _LIBRARY.define(_schema)

_ops = torch.ops.zerofx
UNSHARD = _ops.unshard.default
REDUCE_GRAD = _ops.reduce_grad.default
UNSHARD_START = _ops.unshard_start.default
UNSHARD_WAIT = _ops.unshard_wait.default
FREE = _ops.free.default
KEEP = _ops.keep.default
KEEP_SHARD = _ops.keep_shard.default
REDUCE_START = _ops.reduce_start.default
REDUCE_WAIT = _ops.reduce_wait.default
SYNC_BUFFERS = _ops.sync_buffers.default

STARTS = (UNSHARD_START, REDUCE_START)
WAITS = (UNSHARD_WAIT, REDUCE_WAIT)
PROGRAM_OPS = frozenset(
    (
        UNSHARD_START,
        UNSHARD_WAIT,
        FREE,
        KEEP,
        KEEP_SHARD,
        REDUCE_START,
        REDUCE_WAIT,
        SYNC_BUFFERS,
    )
)
"""Nodes at which a program is cut into compute segments."""
LAYOUT_ARGUMENT = {
    UNSHARD: 2,
    UNSHARD_START: 1,
    FREE: 1,
    KEEP: 2,
    KEEP_SHARD: 2,
    REDUCE_GRAD: 2,
    REDUCE_START: 2,
    SYNC_BUFFERS: 1,
}
"""Which argument of an op is the handle of its layout."""


_Fake = TypeVar("_Fake", bound=Callable[..., Any])
_fakes: dict[Any, Any] = {}


def _fake(name: str) -> Callable[[_Fake], _Fake]:
    """Register a fake kernel in our library."""

    def register(kernel: _Fake) -> _Fake:
        _fakes[getattr(_ops, name).default] = kernel
        _torch_library.register_fake(f"zerofx::{name}", kernel, lib=_LIBRARY)
        return kernel

    return register


def fake_kernel(op: Any) -> Callable[..., Any]:
    """What computes `op` on fake tensors: our own kernel itself, without a dispatcher's detour."""
    return _fakes.get(op, op)


def is_call(node: fx.Node, *ops: Any) -> bool:
    """Whether `node` calls one of `ops`."""
    return node.op == "call_function" and node.target in ops


def is_start(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return is_call(node, *STARTS)


def is_wait(node: fx.Node) -> bool:
    """Whether `node` waits for a member of a collective."""
    return is_call(node, *WAITS)


def members(start: fx.Node) -> list[fx.Node]:
    """The shards of the parameters that `unshard_start` or `reduce_start` moves, in order."""
    shards = start.args[0 if is_call(start, UNSHARD_START) else 1]
    return [shard for shard in cast("list[Any]", shards) if isinstance(shard, fx.Node)]


def gradients(node: fx.Node) -> list[fx.Node]:
    """The full gradients that `reduce_grad` or `reduce_start` reduces, in order."""
    given = node.args[0]
    grads = cast("list[Any]", given) if isinstance(given, (list, tuple)) else [given]
    return [grad for grad in grads if isinstance(grad, fx.Node)]


def full_dtype(full: fx.Node) -> torch.dtype | None:
    """The dtype that `unshard` or `unshard_wait` states; `None`: that of the shard."""
    return cast("torch.dtype | None", full.args[3]) if len(full.args) > 3 else None


def grad_dtype(wait: fx.Node) -> torch.dtype | None:
    """The dtype that `reduce_wait` states; `None`: that of the shard."""
    return cast("torch.dtype | None", wait.args[2]) if len(wait.args) > 2 else None


def codecs(start: fx.Node) -> tuple[str, ...]:
    """Names of the codecs of `unshard_start` (one) or `reduce_start` (two); none: exact."""
    given = start.args[2 if is_call(start, UNSHARD_START) else 3 :]
    named = given[0] if given else None
    return (named,) if isinstance(named, str) else tuple(map(str, cast("list[Any]", named or ())))


def keeps_codes(start: fx.Node) -> bool:
    """Whether `unshard_start` leaves secondary shards in codes."""
    return is_call(start, UNSHARD_START) and len(start.args) > 3 and bool(start.args[3])


def started_by(wait: fx.Node) -> fx.Node:
    """The collective that `unshard_wait` or `reduce_wait` waits for."""
    start = wait.args[0]
    assert isinstance(start, fx.Node)
    return start


def collective_of(node: fx.Node) -> fx.Node | None:
    """The collective that `node` starts or waits for; `None` if it does neither."""
    if is_wait(node):
        return started_by(node)
    return node if is_start(node) else None


def computes(node: fx.Node) -> bool:
    """Whether `node` is an operation of the model's: no input, output, or node of a pass."""
    return node.op == "call_function" and node.target not in PROGRAM_OPS


def waits_of(start: fx.Node) -> list[fx.Node]:
    """The waits for a collective's members, in the order of the members."""
    by_shard = {user.args[1]: user for user in start.users if is_wait(user)}
    return [by_shard[shard] for shard in members(start) if shard in by_shard]


@_fake("unshard")
def _(shard: Tensor, size: list[int], layout: int, dtype: torch.dtype | None = None) -> Tensor:
    return shard.new_empty(size, dtype=dtype)


@_fake("reduce_grad")
def _(grad: Tensor, shard: Tensor, layout: int) -> Tensor:
    return shard.new_empty(shard.shape)


@_fake("unshard_start")
def _(shards: list[Tensor], layout: int, codec: str | None = None, keep: bool = False) -> Tensor:
    return shards[0].new_empty(0)


@_fake("unshard_wait")
def _(pending: Tensor, shard: Tensor, size: list[int], dtype: torch.dtype | None = None) -> Tensor:
    return shard.new_empty(size, dtype=dtype)


@_fake("free")
def _(full: Tensor, layout: int) -> None:
    return None


@_fake("keep")
def _(full: Tensor, shard: Tensor, layout: int) -> None:
    return None


@_fake("keep_shard")
def _(full: Tensor, shard: Tensor, layout: int) -> None:
    return None


@_fake("reduce_start")
def _(
    grads: list[Tensor], shards: list[Tensor], layout: int, codecs: list[str] | None = None
) -> Tensor:
    return grads[0].new_empty(0)


@_fake("reduce_wait")
def _(pending: Tensor, shard: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return shard.new_empty(shard.shape, dtype=dtype or shard.dtype)


@_fake("sync_buffers")
def _(buffers: list[Tensor], layout: int) -> None:
    return None


def _unshard_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Kept as an attribute, not saved: its values do not matter, only which parameter it is.
    ctx.shard, _, ctx.layout, _ = inputs


def _unshard_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return REDUCE_GRAD(grad, ctx.shard, ctx.layout), None, None, None


def _reduce_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    grad, ctx.shard, ctx.layout = inputs
    ctx.size, ctx.dtype = grad.shape, grad.dtype


def _reduce_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    # Each rank differentiates its own loss; the mean is taken once, by the next reduce_grad.
    return UNSHARD(grad, ctx.size, ctx.layout, ctx.dtype), None, None


_torch_library.register_autograd(
    "zerofx::unshard", _unshard_backward, setup_context=_unshard_setup, lib=_LIBRARY
)
_torch_library.register_autograd(
    "zerofx::reduce_grad", _reduce_backward, setup_context=_reduce_setup, lib=_LIBRARY
)
