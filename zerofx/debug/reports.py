"""Read what a dump, or a person, wrote as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from zerofx.errors import ConfigError
from zerofx.frontend.report import VERSION

_AGAIN = "dump it again with this zerofx"


def read_object(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: of the file.
        remedy: what the user does if there is none.

    Raises:
        ConfigError: the file cannot be read, or holds anything else.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", remedy) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a JSON {type(found).__name__}, no object", remedy)
    return cast(dict[str, Any], found)


def read_report(path: Path) -> dict[str, Any]:
    """A `report.json` of this version of its schema.

    Raises:
        ConfigError: it is damaged, or of another version.
    """
    report = read_object(path, _AGAIN)
    if report.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {report.get('version')} of the schema, not {VERSION}", _AGAIN
        )
    if not isinstance(report.get("programs"), list):
        raise ConfigError(f"{path} lists no programs", _AGAIN)
    return report
