"""From a file, or a dictionary, to flat keys."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from zerofx.errors import ConfigError

_STRING = r'"(?:[^"\\]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.S)
_COMMA = re.compile(rf"({_STRING})|,(?=\s*[}}\]])", re.S)

Source = str | os.PathLike[str] | Mapping[str, Any]


def read(source: Source) -> dict[str, Any]:
    """The content of a `ds_config.json`; comments and trailing commas are allowed.

    Raises:
        ConfigError: the file is missing, is no JSON, or names a key twice.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"a configuration is given as {type(source).__name__}", "pass a path, or a dict"
        )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {getattr(error, 'strerror', error)}", "name a ds_config.json"
        ) from None
    for extra in (_COMMENT, _COMMA):
        text = extra.sub(_blank, text)
    try:
        content = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}, line {error.lineno}, column {error.colno}: {error.msg}",
            "write JSON; comments begin with //",
        ) from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no object", 'begin with "{"')
    return content


def flatten(content: Mapping[str, Any], whole: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Values by their paths, such as `zero_optimization.stage`.

    Args:
        content: nested dictionaries.
        whole: paths at which a dictionary is one value.
        prefix: what paths begin with.
    """
    flat: dict[str, Any] = {}
    for name, value in content.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and path not in whole:
            flat.update(flatten(value, whole, f"{path}."))
        else:
            flat[path] = value
    return flat


def _blank(found: re.Match[str]) -> str:
    """A string as it is; of anything else only the line breaks, so that lines keep numbers."""
    return found[1] or "\n" * found[0].count("\n")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(f"named twice in one object: {', '.join(twice)}", "keep one of them")
    return content
