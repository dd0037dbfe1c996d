"""`type(layer) is nn.Linear` in a forward: layers have generated classes, which are subclasses."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

from zerofx.errors import UnsupportedError


def refuse_comparisons(model: nn.Module) -> None:
    """Refuse forwards that would take another branch once layers have classes of their own.

    Raises:
        UnsupportedError: names the lines.
    """
    modules = list(model.modules())
    owners = {type(module) for module in modules if module._parameters}
    forwards = {getattr(type(module), "forward", None) for module in modules}
    found = sorted(line for forward in forwards for line in _comparisons(forward, owners))
    if found:
        raise UnsupportedError(
            "a forward compares the type of a layer with a class; sharded layers have classes of "
            "their own, derived from it",
            "write isinstance(layer, nn.Linear)",
            found,
        )


def _comparisons(forward: Any, owners: set[type[nn.Module]]) -> Iterator[str]:
    forward = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType):
        return
    if (forward.__module__ or "").startswith("torch."):  # None: exec made it
        return
    if not {"type", "__class__"} & set(forward.__code__.co_names):
        return
    try:
        lines, first = inspect.getsourcelines(forward)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError):  # typed in, or generated
        return
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        sides = list(_sides(node))
        if any(map(_is_type_of, sides)) and owners & {_named(side, forward) for side in sides}:
            path, line = inspect.getsourcefile(forward), first + node.lineno - 1
            yield f"{path}:{line}: {ast.unparse(node)}"


def _sides(comparison: ast.Compare) -> Iterator[ast.expr]:
    """What is compared; of `in (nn.Linear, nn.Conv2d)` each."""
    for side in (comparison.left, *comparison.comparators):
        yield from side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else (side,)


def _is_type_of(side: ast.expr) -> bool:
    """Whether it is `type(…)` or `….__class__`."""
    if isinstance(side, ast.Call):
        return isinstance(side.func, ast.Name) and side.func.id == "type"
    return isinstance(side, ast.Attribute) and side.attr == "__class__"


def _named(side: ast.expr, function: FunctionType) -> Any:
    """What a name means in a function's module, attributes of it too; `None` if nothing."""
    if isinstance(side, ast.Attribute):
        return getattr(_named(side.value, function), side.attr, None)
    return function.__globals__.get(side.id) if isinstance(side, ast.Name) else None
