"""Emitted files become kernels: written to a folder, imported from there, launched."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerofx.codegen.emit import emit, kernel_name
from zerofx.codegen.operands import as_int32, check_operands, takes_seed
from zerofx.codegen.tiles import NUM_WARPS, tiling_of
from zerofx.errors import KernelError
from zerofx.ir.kernels import KernelSpec

OPTIONS = {"num_warps": NUM_WARPS, "enable_fp_fusion": False}
"""Compiler options. Products and sums stay apart, so that CUDA rounds as the reference does."""


def write_source(spec: KernelSpec, folder: Path, *, fp8: bool = False) -> Path:
    """Write the kernel's file into `folder`; equal specs get the same file.

    Ranks may share the folder: whoever comes later replaces the file by an equal one.
    """
    text = emit(spec, fp8=fp8)
    name = f"{kernel_name(spec)}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    path = folder / f"{name}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    return path


def import_function(spec: KernelSpec, path: Path) -> Any:
    """The function to launch, from the file at `path`.

    Raises:
        KernelError: Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise KernelError(
            "kernels for CUDA need Triton, which is not installed", "pip install 'zerofx[triton]'"
        )
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return getattr(module, kernel_name(spec))


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A kernel on CUDA devices: what runs is the file at `path`.

    Attributes:
        spec: what it does.
        path: of its source.
        function: what the file defines.
    """

    spec: KernelSpec
    path: Path
    function: Any = dataclasses.field(repr=False, compare=False)

    @staticmethod
    def build(spec: KernelSpec, folder: Path, *, fp8: bool = False) -> TritonKernel:
        """Write the source of `spec` into `folder` and import it; see `emit` for `fp8`.

        Raises:
            KernelError: Triton is not installed.
        """
        path = write_source(spec, folder, fp8=fp8)
        return TritonKernel(spec, path, import_function(spec, path))

    def __call__(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], seed: int = 0) -> None:
        """Launch on the current stream; see `zerofx.codegen.reference.Reference`."""
        check_operands(self.spec, inputs, outputs)
        num_programs = tiling_of(self.spec).num_programs
        if not num_programs:
            return
        seeds = [as_int32(seed)] if takes_seed(self.spec) else []
        with torch.cuda.device_of(outputs[0]):
            self.function[(num_programs,)](*inputs, *outputs, *seeds, **OPTIONS)
