"""Every test that the table of features, or a manual, names is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
_NAMED = re.compile(r"`(\w[\w/]*\.py)::(test_\w+)`")
_ROW = re.compile(r"^\| (?!feature|---)(.*) \|$", re.M)


def _functions(path: Path) -> set[str]:
    nodes = ast.parse(path.read_text()).body
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", ["features.md", "precision.md"])
def test_named_tests_exist(page: str) -> None:
    named = _NAMED.findall((TESTS.parent / "docs" / page).read_text())
    assert len(named) > 10
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).is_file() or name not in _functions(TESTS / file)
    ]
    assert not missing


def test_every_feature_names_its_test() -> None:
    rows = _ROW.findall((TESTS.parent / "docs" / "features.md").read_text())
    assert [row for row in rows if len(_NAMED.findall(row)) != 1] == []


def test_every_error_is_explained() -> None:
    page = (TESTS.parent / "docs" / "troubleshooting.md").read_text()
    tree = ast.parse((TESTS.parent / "zerofx" / "errors.py").read_text())
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert set(re.findall(r"\b\w+Error\b", page)) == classes
