"""Operands of kernels are what their specs say."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zerofx.codegen.tiles import codecs_of
from zerofx.errors import KernelError
from zerofx.ir.kernels import KernelSpec, Unpack


def check_operands(spec: KernelSpec, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Compare number, shape, dtype, layout and device with the spec.

    Raises:
        KernelError: at the first difference.
    """
    kind = type(spec).__name__
    for what, given, wanted in (("input", inputs, spec.inputs), ("output", outputs, spec.outputs)):
        if len(given) != len(wanted):
            raise KernelError(f"{kind} got {len(given)} {what}s, not {len(wanted)}")
        for number, (tensor, (shape, dtype)) in enumerate(zip(given, wanted, strict=True)):
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                raise KernelError(
                    f"{kind} got {tensor.dtype}{list(tensor.shape)} as {what} {number}, "
                    f"not {dtype}{list(shape)}"
                )
            if not tensor.is_contiguous():
                raise KernelError(f"{kind} got {what} {number} not contiguous", "make it so")
    if len({tensor.device for tensor in (*inputs, *outputs)}) > 1:
        raise KernelError(f"{kind} got operands on several devices", "move them to one")


def takes_seed(spec: KernelSpec) -> bool:
    """Whether a seed follows the operands: codes are rounded stochastically."""
    return not isinstance(spec, Unpack) and codecs_of(spec)[1].rounding == "stochastic"


def as_int32(number: int) -> int:
    """The lowest 32 bits of `number` as a signed integer."""
    return (number + 2**31) % 2**32 - 2**31
