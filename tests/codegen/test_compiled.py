"""Emitted kernels compile for sm_80 and sm_90 without a GPU, spill nothing and move wide words."""

from __future__ import annotations

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.codegen.cases import CASES, SHAPES
from zerofx.codegen.build import OPTIONS, import_function, write_source
from zerofx.codegen.operands import takes_seed
from zerofx.codegen.tiles import NUM_WARPS, tiling_of
from zerofx.ir.kernels import KernelSpec

triton: Any = pytest.importorskip("triton", reason="needs Triton: pip install 'zerofx[triton]'")

_POINTERS = {
    torch.uint8: "*u8",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
}
_ALL = CASES | SHAPES
_OTHERWISE = r"\b(?:fma|mad)\.\S*f32|\S+\.(?:approx|ftz)\S*"
"""What may round otherwise than the reference: contracted, approximate, subnormals as zeros."""

_FLOOR = "cvt.rmi.ftz.f32.f32"
"""`tl.floor`; it meets no subnormals, see `zerofx.codegen.blocks.noise`."""

_FUSED = "fma.rn.f32"
"""Of exact products, see `zerofx.codegen.words`."""


def compiled(spec: KernelSpec, capability: int, folder: Path) -> dict[str, Any]:
    """PTX, cubin and so on, as a launch would make them on aligned tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = write_source(spec, folder, fp8=capability >= 89)
    function = import_function(spec, source)
    operands = [*spec.inputs, *spec.outputs]
    types = [_POINTERS[dtype] for _, dtype in operands] + ["i32"] * takes_seed(spec)
    kernel = ASTSource(
        fn=function,
        signature=dict(zip(function.arg_names, types, strict=True)),
        attrs={(at,): [["tt.divisibility", 16]] for at in range(len(operands))},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(kernel, target=target, options=OPTIONS).asm


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """What the assembler gave the kernel, by cuobjdump's names."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    shown = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True)
    return {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", shown.stdout)}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", _ALL)
def test_compiles_without_spills(name: str, capability: int, tmp_path: Path) -> None:
    made = compiled(_ALL[name], capability, tmp_path)
    used = resources(made["cubin"], tmp_path)
    # Spilled registers live on the stack, in local memory.
    assert used["STACK"] == used["LOCAL"] == 0, used
    assert used["REG"] <= 128, used
    exact = {_FUSED} if tiling_of(_ALL[name]).stripes else set[str]()
    assert set(re.findall(_OTHERWISE, made["ptx"])) <= {_FLOOR} | exact


@pytest.mark.parametrize("name", ["pack_int8", "pack_fp8", "unpack_fp8", "repack_int4"])
def test_memory_moves_in_words_of_16_bytes(name: str, tmp_path: Path) -> None:
    ptx = compiled(CASES[name], 90, tmp_path)["ptx"]
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx


def test_fp8_is_converted_by_instructions_where_there_are_any(tmp_path: Path) -> None:
    spec, to, back = CASES["repack_fp8"], "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
    for capability in (80, 90):
        ptx = compiled(spec, capability, tmp_path / str(capability))["ptx"]
        assert (to in ptx, back in ptx) == (capability == 90, capability == 90)


@pytest.mark.parametrize(("name", "most"), [("repack_int4", 24), ("repack_fp8", 36)])
def test_repacks_take_few_instructions(name: str, most: int, tmp_path: Path) -> None:
    """What bounds them, see `docs/kernels.md`; for each number, with some room for compilers."""
    spec = dataclasses.replace(CASES[name], num_blocks=1 << 12, num=1, num_sources=4)
    path = tmp_path / "kernel.cubin"
    path.write_bytes(compiled(spec, 90, tmp_path)["cubin"])
    tool = Path(triton.knobs.nvidia.cuobjdump.path).with_name("nvdisasm")
    shown = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    found = [line for line in shown.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]
    num = sum("NOP" not in line for line in found)
    tile = tiling_of(spec).rows * CASES[name].codec.block
    assert num * 32 * NUM_WARPS / tile < most


def test_bf16_is_rounded_to_the_nearest(tmp_path: Path) -> None:
    """The interpreter cannot tell; see `interpreter.py`."""
    ptx = compiled(CASES["unpack_fp8"], 90, tmp_path)["ptx"]
    conversions = set(re.findall(r"cvt\.\S*bf16\S*", ptx))
    assert conversions and all(each.startswith("cvt.rn.bf16") for each in conversions)
