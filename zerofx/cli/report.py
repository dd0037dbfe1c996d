"""`zerofx report DIR`: a dump as one HTML page."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from zerofx.cli import units
from zerofx.cli.command import Answer
from zerofx.cli.progress import Progress
from zerofx.debug.reports import read_reports
from zerofx.errors import ConfigError
from zerofx.page.build import NAME, write_page


@dataclasses.dataclass(frozen=True)
class Headline:
    """One program of a dump in a line.

    Attributes:
        program: its place in the dump: `graph0/forward`.
        nodes: how many.
        seconds: predicted.
        exposed_seconds: of them, those in which computation waits.
        wire_bytes: that a rank sends.
        peak_bytes: most bytes held at once, parameters at rest excepted.
        peak_node: where.
    """

    program: str
    nodes: int
    seconds: float
    exposed_seconds: float
    wire_bytes: int
    peak_bytes: int
    peak_node: str

    def __str__(self) -> str:
        return (
            f"{self.program}: {self.nodes} nodes, {units.show_seconds(self.seconds)} predicted, of "
            f"which {units.show_seconds(self.exposed_seconds)} exposed; sends "
            f"{units.show_bytes(self.wire_bytes)}; holds at most "
            f"{units.show_bytes(self.peak_bytes)}, at {self.peak_node}"
        )


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Write the page; its figures are printed too."""
    headlines = [
        headline
        for path, report in read_reports(args.dump)
        for headline in headlines_of(report, path.parent.name)
    ]
    if args.output is not None and not args.output.parent.is_dir():
        raise ConfigError(f"{args.output.parent} is no folder", "name a file in one that exists")
    if args.output is not None and args.output.is_dir():
        raise ConfigError(f"{args.output} is a folder", f"name a file in it: {NAME}")
    try:
        page = write_page(args.dump, args.output)
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error.filename}: {error.strerror}",
            "name a file that you may write to: -o FILE",
        ) from error
    data = {"page": str(page), "programs": [dataclasses.asdict(each) for each in headlines]}
    return Answer(data, (*map(str, headlines), f"written to {page}"))


def headlines_of(report: dict[str, Any], graph: str) -> list[Headline]:
    """The programs of a `report.json` that run.

    Args:
        report: what is in it.
        graph: name of its folder.
    """
    return [
        Headline(
            f"{graph}/{program['region']}",
            len(program["nodes"]),
            program["timeline"]["seconds"],
            program["timeline"]["exposed_seconds"],
            program["wire_bytes"],
            program["memory"]["peak_bytes"],
            program["memory"]["peak_node"],
        )
        for program in report["programs"]
        if program["timeline"] is not None
    ]
