"""A process in which Triton interprets kernels, so that they run without a GPU.

The choice is made once a process, when Triton is imported; torch's Inductor imports it too.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from zerofx.codegen.build import TritonKernel
from zerofx.ir.kernels import KernelSpec


class Interpreter:
    """Runs emitted kernels on CPU tensors."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def run(
        self,
        spec: KernelSpec,
        inputs: list[Tensor],
        outputs: list[Tensor],
        seed: int = 0,
        *,
        fp8: bool = False,
    ) -> list[Tensor]:
        """What the kernel of `spec` makes of `outputs`; `fp8` as in `emit`."""
        # Pickled here: torch would pass each tensor as shared memory, with a file of its own.
        job = pickle.dumps((spec, inputs, outputs, seed, fp8))
        return pickle.loads(self._pool.submit(_run, job).result(timeout=120))


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        with mock.patch.dict("os.environ", {"TRITON_INTERPRET": "1"}):
            pool.submit(_ready).result(timeout=120)
        yield Interpreter(pool)


def _ready() -> None:
    import numpy as np
    from triton.runtime import interpreter as emulator

    # Masked lanes are computed too.
    np.seterr(all="ignore")
    theirs = emulator._convert_float

    def convert(values, source, target, rounding):
        """Triton 3.9 cuts bf16 off instead of rounding it, and mistakes its subnormal numbers.

        To fp8 it rounds some ties away from even.
        """
        if (str(source), str(target)) == ("bf16", "fp32"):
            return values.view(np.uint16).astype(np.uint32) << 16
        if (str(source), str(target)) == ("fp32", "bf16"):
            rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
            return rounded.view(torch.uint16).numpy()
        if (str(source), str(target)) == ("fp32", "fp8e4nv"):
            rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy()
        return theirs(values, source, target, rounding)

    emulator._convert_float = convert


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="zerofx-kernels-"))


def _run(job: bytes) -> bytes:
    spec, inputs, outputs, seed, fp8 = pickle.loads(job)
    TritonKernel.build(spec, _folder(), fp8=fp8)(inputs, outputs, seed)
    return pickle.dumps(outputs)
