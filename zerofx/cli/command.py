"""What a subcommand is."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from zerofx.cli.progress import Progress


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a subcommand found.

    Attributes:
        data: for `--json`: dicts, lists, strings, numbers; null stands for infinite ones.
        text: for people; printed in order.
        ok: false if a check failed; the exit code is then 1.
        silent: print nothing: another rank does.
    """

    data: Any
    text: tuple[RenderableType, ...]
    ok: bool = True
    silent: bool = False


@dataclasses.dataclass(frozen=True)
class Command:
    """One subcommand.

    Attributes:
        name: as typed, and of the file in this folder whose `run` does the work.
        summary: one line for `zerofx --help`.
        configure: adds its arguments to a parser.
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]

    def run(self, args: argparse.Namespace, progress: Progress) -> Answer:
        """Do the work. May raise `ZeroFxError`."""
        return importlib.import_module(f"zerofx.cli.{self.name}").run(args, progress)
