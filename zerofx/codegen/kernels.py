"""Which kernel a device gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from zerofx.codegen.build import TritonKernel
from zerofx.codegen.reference import Reference
from zerofx.ir.kernels import KernelSpec

Kernel = Callable[[Sequence[Tensor], Sequence[Tensor], int], None]
"""Called with inputs, outputs and a seed; see `zerofx.codegen.reference.Reference`."""


@cache
def kernel_for(
    spec: KernelSpec, device: torch.device, folder: Path, *, compiled: bool = True
) -> Kernel:
    """The kernel that does `spec` on `device`; the same one for equal specs.

    Args:
        spec: what it does.
        device: CUDA devices get an emitted Triton kernel, all others the reference.
        folder: where sources are written, and imported from.
        compiled: the reference goes through Inductor; otherwise it runs op by op.

    Raises:
        KernelError: the device is a CUDA device and Triton is not installed.
    """
    if device.type == "cuda":
        fp8 = torch.cuda.get_device_capability(device) >= (8, 9)
        return TritonKernel.build(spec, folder, fp8=fp8)
    return Reference(spec, compiled)
