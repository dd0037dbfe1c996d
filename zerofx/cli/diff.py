"""`zerofx diff A B`: what differs between two dumps."""

from __future__ import annotations

import argparse
import dataclasses

from zerofx.cli.command import Answer
from zerofx.cli.progress import Progress
from zerofx.debug.compare import compare
from zerofx.errors import ConfigError


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Compare; the check fails if anything differs, as with `diff`."""
    for path in (args.one, args.other):
        if not path.exists():
            raise ConfigError(f"{path} does not exist", "dump with ZEROFX_DUMP=folder")
    found = compare(args.one, args.other)
    text = tuple(str(each) for each in found) or ("no difference",)
    return Answer([dataclasses.asdict(each) for each in found], text, ok=not found)
