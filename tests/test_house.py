"""The rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import zerofx

PACKAGE = Path(zerofx.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted(Path(__file__).parent.rglob("*.py"))
MAX_LINES = 300


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE.parent)) if PACKAGE in path.parents else path.name


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_file(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES, "split it by noun"
    assert path.name != "utils.py", "name the noun"
    assert ast.get_docstring(tree), "the module has no docstring"
    missing = [name for name, node in _public(tree) if not ast.get_docstring(node)]
    assert not missing, f"no docstring: {missing}"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text), "do it, or open an issue"
    if path.parent.name != "torch_private":
        privates = sorted(_torch_privates(tree))
        assert not privates, f"go through zerofx/torch_private: {privates}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "page").glob("*.[!p]*")), ids=_name)
def test_part_of_the_page(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES, "split it by noun"


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_test_file(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_LINES, "split it by noun"
    assert not text or ast.get_docstring(ast.parse(text)), "the module has no docstring"


@pytest.mark.parametrize("path", [f for f in FILES if f.name == "__init__.py"], ids=_name)
def test_a_package_lists_its_modules(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    if path.parent == PACKAGE:
        pytest.skip("the root lists public names; docs/map.md lists the packages")
    modules = [f.stem for f in path.parent.glob("*.py") if f.name != "__init__.py"]
    missing = [name for name in modules if not re.search(rf"\b{name}\b", text)]
    assert not missing, f"the docstring of {_name(path)} does not mention {missing}"


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _public(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Documented]]:
    """Public functions, classes and methods; overrides may rely on the docstring of their base."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, Documented) or node.name.startswith("_"):
            continue
        if not (prefix and isinstance(node, ast.FunctionDef) and _overrides(tree)):
            yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from _public(node, f"{prefix}{node.name}.")


def _torch_privates(tree: ast.AST) -> set[str]:
    """Private modules and names of torch; operators have private names that schemas keep."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Store):
            found.add(ast.unparse(node))
    return {name for name in found if re.match(r"torch\.(?!ops\.)(\w+\.)*_[a-zA-Z]", name)}


def _overrides(tree: ast.AST) -> bool:
    """Whether a class has bases, whose methods are documented there."""
    return isinstance(tree, ast.ClassDef) and bool(tree.bases)
