"""Every torch private that zerofx uses exists in the torch that is installed."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import zerofx

SOURCES = sorted((Path(zerofx.__file__).parent / "torch_private").glob("*.py"))

# Private attributes of objects, which the source does not say the type of.
OWNERS = {
    "_allow_implicit_replication": "torch.distributed.tensor.DTensor._op_dispatcher",
    "_boxed_call": None,  # set, not read
    "_custom_op_handlers": "torch.distributed.tensor.DTensor._op_dispatcher",
    "_expr": None,  # torch.fx.experimental.sym_node.SymNode sets it when it is made
    "_isolate_recompiles_id": None,  # where torch.compile takes isolate_recompiles
    "_cdata": "torch.UntypedStorage",  # of torch.Generator, too
    "_foreach_copy_": "torch.ops.aten",
    "_foreach_lerp_": "torch.ops.aten",
    "_foreach_max": "torch.ops.aten",
    "_foreach_norm": "torch.ops.aten",
    "_foreach_sign_": "torch.ops.aten",
    "_get_backend": "torch.distributed.ProcessGroup",
    "_get_op_type": "torch.distributed.Work",
    "_optimizer_step_post_hooks": None,  # every torch.optim.Optimizer has it once it is made
    "_optimizer_step_pre_hooks": None,
    "_raw_saved_tensors": "torch.autograd.function.BackwardCFunction",
    "_schema": "torch.ops.aten.add.Tensor",
    "_local_tensor": "torch.distributed.tensor.DTensor",
    "_spec": "torch.distributed.tensor.DTensor",
    "_orig_mod": "torch._dynamo.eval_frame.OptimizedModule",
}


# What the source asks for only where torch.compile takes isolate_recompiles.
OF_REGIONS = {
    "_get_cache_entries_for_region",
    "get_eval_frame_isolate_recompiles_id",
    "_next_isolate_recompiles_id",
}


@cache
def _tree() -> ast.Module:
    parsed = [ast.parse(source.read_text()) for source in SOURCES]
    return ast.Module([node for one in parsed for node in one.body], [])


def _imports() -> dict[str, str]:
    """Dotted path of every name that the file takes from torch, by what it is called there."""
    found = {}
    for node in ast.walk(_tree()):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                a.asname or a.name.partition(".")[0]: a.name
                for a in node.names
                if a.name.startswith("torch")
            }
    return found


def _chains() -> Iterator[tuple[str, list[str]]]:
    """The outermost attribute chains: what they start from, and the attributes."""
    inner: set[int] = set()
    for node in ast.walk(_tree()):
        if not isinstance(node, ast.Attribute) or id(node) in inner:
            continue
        attributes: list[str] = []
        value: ast.expr = node
        while isinstance(value, ast.Attribute):
            inner.add(id(value))
            attributes.insert(0, value.attr)
            value = value.value
        yield (value.id if isinstance(value, ast.Name) else ""), attributes


def _foreign_chains() -> Iterator[tuple[str, list[str]]]:
    """Chains that do not start from a module of Python's own."""
    own = {
        alias.asname or alias.name
        for node in ast.walk(_tree())
        if isinstance(node, ast.Import)
        for alias in node.names
        if not alias.name.startswith("torch")
    }
    return ((start, attributes) for start, attributes in _chains() if start not in own)


def _used() -> list[str]:
    imports = _imports()
    names = set(imports.values())
    for start, attributes in _foreign_chains():
        if start in imports:
            names.add(".".join([imports[start], *attributes]))
        else:
            private = [name for name in attributes if _is_private(name)]
            names |= {f"{OWNERS[name]}.{name}" for name in private if OWNERS.get(name)}
    return sorted(names)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _resolve(path: str) -> Any:
    """The object at a dotted path, importing submodules on the way."""
    found: Any = torch
    for number, part in enumerate(parts := path.split(".")[1:]):
        if not hasattr(found, part) and isinstance(found, ModuleType):
            found = importlib.import_module(".".join(["torch", *parts[: number + 1]]))
        else:
            found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", _used())
def test_name_exists(path: str) -> None:
    if path.endswith("._orig_mod"):
        assert (
            "_orig_mod" in _resolve("torch._dynamo.eval_frame").OptimizedModule._opt_mod_attributes
        )
        return
    has_regions = "isolate_recompiles" in signature(torch.compile).parameters
    if path.rpartition(".")[2] in OF_REGIONS and not has_regions:
        pytest.skip("this torch has no regions")
    try:
        _resolve(path)
    except (AttributeError, ImportError) as error:
        pytest.fail(f"{path} is missing in torch {torch.__version__}: {error}")


def test_attributes_of_objects_are_listed() -> None:
    imports = _imports()
    unknown = {
        name
        for start, attributes in _foreign_chains()
        for name in attributes
        if start not in imports and _is_private(name) and name not in OWNERS
    }
    assert not unknown, f"say in OWNERS which type these attributes belong to: {sorted(unknown)}"


def test_a_missing_name_is_found() -> None:
    with pytest.raises((AttributeError, ImportError)):
        _resolve("torch._dynamo.no_such_module.name")
