"""Read what a dump wrote."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerofx.errors import ConfigError
from zerofx.frontend.report import VERSION
from zerofx.ir.spec import Region
from zerofx.page.build import find_reports, graph_folders, read_object

_AGAIN = "dump it again with this zerofx"
# What commands read of a program: a type, one of several values, or what is inside.
_PROGRAM: dict[str, Any] = {
    "region": tuple(region.value for region in Region),
    "passes": [{"name": str, "options": dict}],
    "collectives": [{"kind": str}],
    "kept": [str],
    "wire_bytes": int,
    "peak_full_bytes": int,
    "nodes": list,
    "timeline": dict | None,
    "memory": dict | None,
}
# A program that never runs has null in both places.
_PREDICTED = {
    "timeline": {"seconds": int | float, "exposed_seconds": int | float},
    "memory": {"peak_bytes": int, "peak_node": str},
}


def read_reports(dump: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Each `report.json` of a dump, or of one graph of it, with its path; see `read_report`.

    Raises:
        ConfigError: there is none, or programs were dumped without one.
    """
    graphs = {} if (dump / "report.json").is_file() else graph_folders(dump)
    for folder in graphs.values():
        # Without programs, it is the user's: an older run's graph went, other files stayed.
        begun = any(folder.glob("*/[0-9][0-9][0-9]_*.txt"))
        if begun and not (folder / "report.json").is_file():
            raise ConfigError(
                f"{folder} holds programs, but no file report.json",
                "dump it again to the end, or name a folder graph<N> that has one",
            )
    for path in find_reports(dump):
        yield path, read_report(path)


def read_report(path: Path) -> dict[str, Any]:
    """A `report.json` of this version of its schema.

    Raises:
        ConfigError: it is damaged, or of another version; names what is missing or wrong in it.
    """
    report = read_object(path, _AGAIN)
    if report.get("version") != VERSION:
        raise ConfigError(
            f"{path} has version {report.get('version')} of the schema, not {VERSION}", _AGAIN
        )
    programs = report.get("programs")
    if not isinstance(programs, list) or not programs:
        raise ConfigError(f"{path} lists no programs", _AGAIN)
    wrong = [
        each
        for number, program in enumerate(programs)
        for each in _wrong(program, _expected(program), f"programs[{number}]")
    ]
    if wrong:
        raise ConfigError(f"{path} is damaged", _AGAIN, wrong)
    return report


def _expected(program: Any) -> dict[str, Any]:
    """What a program's entry should have; predictions, if it has any."""
    runs = isinstance(program, dict) and any(program.get(key) is not None for key in _PREDICTED)
    return _PROGRAM | _PREDICTED if runs else _PROGRAM


def _wrong(found: Any, expected: Any, where: str) -> Iterator[str]:
    """Places where data is not what it should be."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for key, inner in expected.items():
            if key in found:
                yield from _wrong(found[key], inner, f"{where}.{key}")
            else:
                yield f"{where}.{key} is missing"
    elif isinstance(expected, list) and isinstance(found, list):
        for number, each in enumerate(found):
            yield from _wrong(each, expected[0], f"{where}[{number}]")
    elif not _fits(found, expected):
        yield f"{where} is {reprlib.repr(found)}"


def _fits(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return found in expected
    return not isinstance(expected, (dict, list)) and isinstance(found, expected)
