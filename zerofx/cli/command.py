"""What a subcommand is."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

from rich.console import RenderableType

from zerofx.cli.progress import Progress


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a subcommand found.

    Attributes:
        data: for `--json`: dicts, lists, strings, numbers.
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
        name: as typed.
        summary: one line for `zerofx --help`.
        configure: adds its arguments to a parser.
        run: does the work. May raise `ZeroFxError`.
    """

    name: str
    summary: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, Progress], Answer]
