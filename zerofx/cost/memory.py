"""What a rank holds: model states in closed form, and exactly for given parameters.

The closed form is that of ZeRO (arXiv 1910.02054, §3.1 and figure 1): with Ψ parameters of which
each costs p bytes as a value, g as a gradient and o in the optimizer, on W ranks

    stage 0   (p + g + o) Ψ                 stage 2   p Ψ + (g + o) Ψ/W
    stage 1   (p + g) Ψ + o Ψ/W             stage 3   (p + g + o) Ψ/W

Where only τ of them are trained, g and o count for τ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import sympy  # pyright: ignore[reportMissingTypeStubs]
import torch

from zerofx.ir.spec import ParamSpec

PSI: Any = sympy.Symbol("Ψ", positive=True)
"""Number of parameters."""
TAU: Any = sympy.Symbol("τ", positive=True)
"""Number of those that are trained, where others are frozen."""
W: Any = sympy.Symbol("W", positive=True)
"""Number of ranks."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bytes of one parameter in each of its forms.

    Attributes:
        name: what to call it.
        param: the value that the model computes with.
        grad: the gradient.
        optimizer: everything that only the optimizer reads, master weights included.
        dtypes: of parameters.
    """

    name: Literal["fp32", "mixed"]
    param: Any
    grad: Any
    optimizer: Any
    dtypes: tuple[torch.dtype, ...]

    @property
    def total(self) -> Any:
        """Bytes of a parameter that nobody shares."""
        return self.param + self.grad + self.optimizer


FP32_ADAM = Precision("fp32", 4, 4, 8, (torch.float32,))
"""Adam on fp32 parameters: two moments."""
MIXED_ADAM = Precision("mixed", 2, 2, 12, (torch.bfloat16,))
"""16-bit values and gradients; fp32 master weights and two moments (ZeRO §3.1)."""


def precision_of(specs: Iterable[ParamSpec], asked: Precision) -> Precision:
    """That of a model, without master weights; of parameters in several dtypes the mean.

    Args:
        specs: its parameters.
        asked: `MIXED_ADAM` stays as it is.
    """
    known = list(specs)
    if asked.name == "mixed" or not known:
        return asked
    param, grad = _mean_bytes(known), _mean_bytes([s for s in known if s.trainable])
    dtypes = tuple(dict.fromkeys(spec.dtype for spec in known))
    return dataclasses.replace(asked, param=param, grad=grad, optimizer=2 * grad, dtypes=dtypes)


def _mean_bytes(specs: Sequence[ParamSpec]) -> Any:
    """Of a number, to the hundredth of a byte."""
    total = sum(spec.numel * spec.dtype.itemsize for spec in specs)
    return sympy.Rational(round(100 * total / max(1, sum(spec.numel for spec in specs))), 100)


@dataclasses.dataclass(frozen=True)
class States:
    """Bytes of model states on one rank, or expressions of Ψ and W for them.

    Attributes:
        params: parameter values between steps.
        grads: gradients after a backward.
        optimizer: optimizer state and master weights.
    """

    params: Any
    grads: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        """All of it."""
        return self.params + self.grads + self.optimizer


def formula(
    stage: int,
    precision: Precision,
    per_node: int = 0,
    copy_bytes: Any = None,
    cast_bytes: int | None = None,
    trained: Any = PSI,
) -> States:
    """Model states in Ψ and W, without padding.

    Stage 1 holds all full gradients until backward ends, which is what the paper counts. At stage 3
    secondary shards, if the `per_node` ranks of a node keep any, count as values; at stages 1 and 2
    so do full values in another dtype, beside the shards that are cast to it.

    Args:
        stage: ZeRO stage.
        precision: of parameters and optimizer.
        per_node: ranks of a node that keep secondary shards; 0: there are none.
        copy_bytes: of a number in those; by default a full value's.
        cast_bytes: of a number in full values, and in gradients until they are reduced, if
            parameters are cast; see option `param_dtype`.
        trained: number of parameters that have gradients.
    """
    share, full = PSI / W, precision.param if cast_bytes is None else cast_bytes
    copied = full if copy_bytes is None else copy_bytes
    params = {0: precision.param * PSI, 3: precision.param * share}.get(stage, full * PSI)
    if cast_bytes is not None and stage in (1, 2):
        params += precision.param * share
    if per_node and stage == 3:
        params += copied * PSI / per_node
    held = precision.grad if stage == 0 or cast_bytes is None else cast_bytes
    return States(
        params,
        precision.grad * trained / W if stage > 1 else held * trained,
        precision.optimizer * (trained / W if stage > 0 else trained),
    )


def states(specs: Iterable[ParamSpec], precision: Precision) -> States:
    """Bytes on the rank that holds most (the first), padding included, after a backward.

    Values and, without master weights, moments have the dtype of the parameter.
    Gradients are sharded then at every stage but 0. Frozen parameters have neither gradients
    nor optimizer state. Secondary shards count as values.
    """
    params = grads = optimizer = 0
    numbers = 3 if precision.name == "mixed" else 2  # of an element: moments, and a master weight
    for spec in specs:
        own = spec.shard_shape(0).numel()
        params += _held_bytes(spec) + spec.secondary_bytes
        if spec.trainable:
            grads += own * spec.grad_dtype.itemsize
            optimizer += own * numbers * state_itemsize(spec, precision)
    return States(params, grads, optimizer)


def state_itemsize(spec: ParamSpec, precision: Precision) -> int:
    """Bytes of a number of optimizer state: fp32 beside master weights, else the parameter's."""
    return 4 if precision.name == "mixed" else spec.dtype.itemsize


def _held_bytes(spec: ParamSpec) -> int:
    """Of a parameter's values between steps."""
    if not spec.layout.sharded:
        return spec.numel * spec.dtype.itemsize
    shard = spec.chunk_rows * spec.row_numel * spec.dtype.itemsize
    if not spec.layout.resident:
        return shard
    # A resident copy in another dtype lies beside the shard; else the shard is a part of it.
    return spec.full_bytes + (shard if spec.full_dtype is not spec.dtype else 0)


def wire_formula(
    stage: int,
    precision: Precision,
    gather: Any = None,
    reduce: tuple[Any, Any] | None = None,
    per_node: int = 0,
    copy_bytes: Any = None,
    cast_bytes: int | None = None,
    trained: Any = PSI,
) -> Any:
    """Bytes that a rank sends per step, in Ψ and W (ZeRO §7): 2Ψ, and 3Ψ at stage 3.

    Args:
        stage: ZeRO stage.
        precision: of parameters and optimizer.
        gather: bytes of a number in a gather of stage 3; by default a value's.
        reduce: bytes of a number in the two hops of a reduction; by default a gradient's.
        per_node: ranks of a node.
        copy_bytes: of a number in the secondary shards that backward gathers inside the node;
            `None`: it gathers over all ranks.
        cast_bytes: of a number in full values and gradients, if parameters are cast.
        trained: number of parameters that have gradients; others travel at stage 3 only.
    """
    value = precision.param if cast_bytes is None else cast_bytes
    updated = precision.grad if cast_bytes is None else cast_bytes
    everywhere, reduced = PSI * (W - 1) / W, trained * (W - 1) / W
    gathered = updated * reduced
    if stage == 3:
        forward = (value if gather is None else gather) * everywhere
        inside = PSI * sympy.Rational(per_node - 1, per_node) if per_node else everywhere
        gathered = forward + (forward if copy_bytes is None else copy_bytes * inside)
    first, last = reduce or (updated, updated)
    if first == last or not per_node:
        return gathered + first * reduced
    across = trained * (sympy.Rational(1, per_node) - 1 / W)
    return gathered + first * (reduced - across) + last * across
