"""Emitted sources are what they were: `ZEROFX_UPDATE_GOLDEN=1 pytest tests/codegen` renews them."""

from __future__ import annotations

import ast
import dataclasses
import os
from pathlib import Path

import pytest
import torch

from tests.codegen.cases import CASES, SHAPES
from tests.passes.golden import FOLDER
from zerofx.codegen.build import write_source
from zerofx.codegen.emit import emit, kernel_name
from zerofx.codegen.tiles import tiling_of
from zerofx.ir.kernels import Pack
from zerofx.ir.parcels import Codec, Member, Parcels


@pytest.mark.parametrize("name", CASES)
def test_source_is_golden(name: str) -> None:
    path, found = FOLDER / "codegen" / f"{name}.py", emit(CASES[name], fp8="repack" in name)
    if os.environ.get("ZEROFX_UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(found)
    assert path.exists(), f"no {path}: run with ZEROFX_UPDATE_GOLDEN=1"
    assert found == path.read_text()


def test_every_golden_file_has_a_case() -> None:
    assert {path.stem for path in (FOLDER / "codegen").iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES | SHAPES)
def test_source_is_fit_to_be_read(name: str) -> None:
    spec = (CASES | SHAPES)[name]
    text = emit(spec)
    assert max(map(len, text.splitlines())) <= 100
    tree = ast.parse(text)
    assert ast.get_docstring(tree)
    assert kernel_name(spec) in {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}


def test_tensors_may_be_called_anything() -> None:
    """Names of modules are any text without a point."""
    odd = ('a"""b', "tail\\", "x\nimport os", "a\\u.weight", "a\rb", "\ud800")
    for members in ((name, "b") for name in odd):
        tensors = tuple(Member(name, 64, 64, torch.float32) for name in members)
        text = emit(Pack(Parcels(tensors, Codec(), 1)))
        assert len(ast.parse(text.encode()).body) == 5


def test_equal_specs_share_a_file_and_others_do_not(tmp_path: Path) -> None:
    spec = CASES["pack_int8"]
    assert isinstance(spec, Pack)
    first = write_source(spec, tmp_path)
    assert write_source(dataclasses.replace(spec), tmp_path) == first
    parcels = dataclasses.replace(
        spec.parcels, codec=dataclasses.replace(spec.parcels.codec, block=64)
    )
    assert write_source(Pack(parcels), tmp_path) != first
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".py", ".py"]


def test_addresses_past_32_bits_are_wide() -> None:
    assert "tl.program_id(0).to(tl.int64)" in emit(SHAPES["pack_past_32_bits"])
    assert "int64" not in emit(CASES["pack_int8"])


def test_a_tile_belongs_to_one_tensor() -> None:
    tiling = tiling_of(CASES["pack_int4_two_hops"])
    assert [s.num_tiles for s in tiling.stretches] == [12, 1, 1]
    assert tiling.num_programs == 4 * 14
