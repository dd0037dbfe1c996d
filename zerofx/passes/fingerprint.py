"""What ranks compare of their passes before any of them runs: names, order, options, code."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import sys
from collections.abc import Sequence
from types import CodeType
from typing import Any

from zerofx.passes.base import Pass


def fingerprint(passes: Sequence[Pass]) -> tuple[str, ...]:
    """One line for the order and one for each pass, equal on ranks that run the same."""
    order = f"passes: {', '.join(each.name for each in passes)}"
    return (order, *(f"pass {each.name}: {_describe(each)}" for each in passes))


def _describe(each: Pass) -> str:
    options = ", ".join(
        f"{field.name}={getattr(each, field.name)!r}" for field in dataclasses.fields(each)
    )
    code = [_code_of(kind) for kind in type(each).__mro__ if _is_foreign(kind)]
    digest = hashlib.sha256("\n".join(code).encode()).hexdigest()[:12] if code else ""
    return f"{type(each).__qualname__}({options})" + (f", code {digest}" if code else "")


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
