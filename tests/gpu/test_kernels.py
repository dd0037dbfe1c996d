"""Emitted kernels on a CUDA device write the bits that the reference writes on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels import call_of, copying, graph_seconds, specs_of
from tests.codegen.cases import CASES, SHAPES
from tests.codegen.strategies import outputs_for, values_for, wires_for
from tests.gpu.backends import NEEDS_CUDA
from zerofx.codegen.build import TritonKernel
from zerofx.codegen.kernels import kernel_for
from zerofx.codegen.reference import Reference
from zerofx.ir.kernels import Pack, operand_bytes
from zerofx.ir.parcels import Codec

pytestmark = NEEDS_CUDA

_ALL = {name: spec for name, spec in (CASES | SHAPES).items() if operand_bytes(spec) < 2**28}


@pytest.mark.parametrize("name", _ALL)
def test_cuda_writes_the_bits_of_the_reference(name: str, tmp_path: Path) -> None:
    spec, device = _ALL[name], torch.device("cuda")
    if isinstance(spec, Pack):
        inputs = [values_for((m.numel,), m.dtype, 3) for m in spec.parcels.members]
    else:
        inputs = [wires_for(spec, 3)]
    wanted = outputs_for(spec, 7)
    Reference(spec)(inputs, wanted, 5)
    outputs = [output.to(device) for output in outputs_for(spec, 7, 85)]
    kernel = kernel_for(spec, device, tmp_path)
    assert isinstance(kernel, TritonKernel)
    kernel([each.to(device) for each in inputs], outputs, 5)
    for got, want in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["pack", "unpack", "repack"])
@pytest.mark.parametrize("code", ["int8", "int4", "fp8"])
def test_at_least_85_percent_of_a_copy(code: Any, name: str, tmp_path: Path) -> None:
    spec, device = specs_of(Codec(code), 1 << 28)[name], torch.device("cuda")
    run = call_of(kernel_for(spec, device, tmp_path), spec, device)
    copy = graph_seconds(copying(operand_bytes(spec), "cuda"))
    assert graph_seconds(run) <= copy / 0.85
