"""What ranks compare of their passes before any of them runs: names, order, options, code."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, cast

from zerofx.passes.base import Pass


def fingerprint(passes: Sequence[Pass]) -> tuple[str, ...]:
    """One line for the order and one for each pass, equal on ranks that run the same."""
    order = f"passes: {', '.join(each.name for each in passes)}"
    return (order, *(f"pass {each.name}: {_describe(each)}" for each in passes))


def _describe(each: Pass) -> str:
    code = [_code_of(kind) for kind in type(each).__mro__ if _is_foreign(kind)]
    digest = hashlib.sha256("\n".join(code).encode()).hexdigest()[:12] if code else ""
    return _text(each) + (f", code {digest}" if code else "")


def _text(value: Any) -> str:
    """As `repr`, but equal in all processes, which have sets in orders of their own."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        compared = (field.name for field in dataclasses.fields(value) if field.compare)
        options = ", ".join(f"{name}={_text(getattr(value, name))}" for name in compared)
        return f"{type(value).__qualname__}({options})"
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{_text(key)}: {_text(item)}" for key, item in items) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_text, cast("set[Any]", value)))) + "}"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(map(_text, cast("list[Any]", value))) + ")"
    return repr(value)


def _is_foreign(kind: type) -> bool:
    """Whether the class is someone else's: all ranks have the same zerofx."""
    return kind.__module__.partition(".")[0] not in ("zerofx", "builtins", "abc")


def _code_of(kind: type) -> str:
    """The text of the class's module, helpers included; of the class in a notebook."""
    for thing in (sys.modules.get(kind.__module__), kind):
        try:
            return inspect.getsource(thing)  # pyright: ignore[reportArgumentType]
        except (OSError, TypeError):
            continue
    functions = sorted((name, getattr(f, "__code__", None)) for name, f in vars(kind).items())
    return "\n".join(f"{name} {_bytecode(code)}" for name, code in functions if code is not None)


def _bytecode(code: CodeType) -> str:
    constants: list[Any] = [
        _bytecode(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    return f"{code.co_code.hex()} {code.co_names} {constants}"
