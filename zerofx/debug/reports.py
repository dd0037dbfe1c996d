"""Read what a dump wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerofx.errors import ConfigError
from zerofx.frontend.report import VERSION
from zerofx.page.build import read_object

_AGAIN = "dump it again with this zerofx"
_KEYS = (
    *("region", "passes", "collectives", "kept", "wire_bytes", "peak_full_bytes", "nodes"),
    *("timeline", "memory"),
)
# A program that never runs has null there.
_PREDICTED = {
    "timeline": ("seconds", "exposed_seconds"),
    "memory": ("peak_bytes", "peak_node"),
}


def read_report(path: Path) -> dict[str, Any]:
    """A `report.json` of this version of its schema.

    Raises:
        ConfigError: it is damaged, or of another version; names keys that are missing.
    """
    report = read_object(path, _AGAIN)
    if report.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {report.get('version')} of the schema, not {VERSION}", _AGAIN
        )
    if not isinstance(report.get("programs"), list):
        raise ConfigError(f"{path} lists no programs", _AGAIN)
    lost = [
        f"programs[{number}].{key}"
        for number, program in enumerate(report["programs"])
        for key in _missing(program)
    ]
    if lost:
        raise ConfigError(f"{path} lacks keys", _AGAIN, lost)
    return report


def _missing(program: Any) -> Iterator[str]:
    """Keys that a program's entry should have."""
    if not isinstance(program, dict):
        program = {}
    yield from (key for key in _KEYS if key not in program)
    for section, keys in _PREDICTED.items():
        found = program.get(section)
        yield from (f"{section}.{key}" for key in keys if found is not None and key not in found)
