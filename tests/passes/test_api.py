"""The built-in passes are written with what every author of a pass has, and with nothing else."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import zerofx.passes
from zerofx.config import ZeroConfig
from zerofx.passes.pipelines import pipeline

PUBLIC = {
    "zerofx.cost",
    "zerofx.errors",
    "zerofx.ir",
    "zerofx.passes.base",
    "zerofx.passes.buckets",
    "zerofx.passes.quantize",
    "zerofx.passes.room",
    "zerofx.passes.seams",
}
"""What docs/passes.md promises; of `zerofx.ir` and `zerofx.cost` every module."""

EDITS = {
    "call_function",
    "create_node",
    "eliminate_dead_code",
    "erase_node",
    "inserting_after",
    "inserting_before",
    "node_copy",
    "prepend",
    "replace_all_uses_with",
    "replace_input_with",
    "update_arg",
}
"""Methods that change a graph behind the editor's back."""

_HELPERS = tuple(f"zerofx.passes.{each}" for each in ("buckets", "quantize", "room", "seams"))
_CONFIGS = [
    *(ZeroConfig(stage=stage) for stage in (0, 1, 2, 3)),
    ZeroConfig(quantize_weights="int8", quantize_gradients="int8"),
]
MODULES = sorted({type(each).__module__ for one in _CONFIGS for each in pipeline(one)})


def _tree(module: str) -> ast.Module:
    source = importlib.import_module(module).__file__
    assert source is not None
    return ast.parse(Path(source).read_text())


def _imports(tree: ast.Module) -> dict[str, list[str]]:
    """Names taken from each module of zerofx."""
    return {
        node.module: [alias.name for alias in node.names]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zerofx")
    }


@pytest.mark.parametrize("module", MODULES)
def test_built_in_passes_import_what_is_public(module: str) -> None:
    imports = _imports(_tree(module))
    assert "zerofx.passes.base" in imports
    for source, names in imports.items():
        stem = ".".join(source.split(".")[:2])
        assert source in PUBLIC or (stem in PUBLIC and stem != "zerofx.passes"), source
        assert not any(name.startswith("_") for name in names), names


@pytest.mark.parametrize("module", [*MODULES, *_HELPERS])
def test_built_in_passes_edit_through_the_editor(module: str) -> None:
    used = {node.attr for node in ast.walk(_tree(module)) if isinstance(node, ast.Attribute)}
    assert not used & EDITS


def test_the_guide_names_everything_that_is_exported() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "passes.md").read_text()
    missing = [name for name in zerofx.passes.__all__ if f"`{name}" not in guide]
    assert not missing
    assert all(module in guide for module in PUBLIC)
