"""Put a dump into one HTML file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, cast

from zerofx.errors import ConfigError

NAME = "report.html"
"""Where a dump has its page."""

AFRESH = "dump it again, into an empty folder"
"""What helps where a file of a dump is damaged."""

_GRAPH = re.compile("graph(0|[1-9][0-9]*)")
_REMEASURE = "delete it, or run the program again"
_SCRIPTS = ("format", "step", "lanes", "memory", "tables", "program", "passes", "main")


def write_page(dump: Path, target: Path | None = None) -> Path:
    """Write the page of a dump.

    Args:
        dump: a folder that ZEROFX_DUMP wrote, or a folder `graph<N>` of one.
        target: the file; by default `report.html` in the dump.

    Returns:
        The file.

    Raises:
        ConfigError: the folder holds no dump.
    """
    page = build_page(dump)
    target = target or dump / NAME
    partial = target.with_name(target.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    return partial.replace(target)


def build_page(dump: Path) -> str:
    """The page of a dump, as text; see `write_page`."""
    reports = find_reports(dump)
    data = "\n".join(block for report in reports for block in _blocks(report))
    parts = {
        "style": _part("style.css"),
        "data": data,
        "script": "\n".join(_part(f"{name}.js") for name in _SCRIPTS),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _part("page.html"))


def find_reports(dump: Path) -> list[Path]:
    """The files `report.json` of a dump, in the order of its graphs.

    Raises:
        ConfigError: there is none.
    """
    if (dump / "report.json").is_file():
        return [dump / "report.json"]
    reports = (folder / "report.json" for folder in graph_folders(dump).values())
    found = [report for report in reports if report.is_file()]
    if not found:
        raise ConfigError(f"{dump} holds no dump", "name a folder that ZEROFX_DUMP wrote")
    return found


def graph_folders(dump: Path) -> dict[int, Path]:
    """The folders `graph<N>` of a dump by number, in order; others are the user's."""
    named = ((_GRAPH.fullmatch(folder.name), folder) for folder in dump.glob("graph*"))
    return dict(sorted((int(match[1]), folder) for match, folder in named if match))


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
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}", remedy) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a JSON {type(found).__name__}, no object", remedy)
    return cast(dict[str, Any], found)


def read_text(path: Path, remedy: str) -> str:
    """What is in a text file; see `read_object`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}", remedy) from error


def _blocks(report: Path) -> Iterator[str]:
    """Data of one graph; it is not parsed here, since a dump writes its page anew and anew."""
    yield _data("graph", read_text(report, AFRESH))
    diffs = {
        folder.name: [
            {"pass": path.stem, "diff": read_text(path, AFRESH)}
            for path in sorted(folder.glob("*.diff"))
        ]
        for folder in sorted(report.parent.iterdir())
        if folder.is_dir()
    }
    yield _data("diffs", json.dumps(diffs))
    times = sorted(report.parent.glob("*/measured.json"))
    measured = {path.parent.name: read_object(path, _REMEASURE) for path in times}
    yield _data("measured", json.dumps(measured))


def _data(kind: str, text: str) -> str:
    """JSON that HTML cannot mistake for its own."""
    safe = text.strip().replace("<", "\\u003c")
    return f'<script type="application/json" class="{kind}">{safe}</script>'


def _part(name: str) -> str:
    return (resources.files("zerofx.page") / name).read_text(encoding="utf-8")
