"""Read what a dump wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerofx.errors import ConfigError
from zerofx.frontend.report import VERSION
from zerofx.page.build import read_object

_AGAIN = "dump it again with this zerofx"


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
