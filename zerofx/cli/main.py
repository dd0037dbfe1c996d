"""The command line: parse, run one subcommand, print its answer.

Exit codes: 0, or 1 if a check failed or the model is refused, or 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, cast

from rich.console import Console

from zerofx.cli import completion
from zerofx.cli.arguments import COMMANDS
from zerofx.cli.command import Answer
from zerofx.cli.progress import Progress
from zerofx.errors import ConfigError, ZeroFxError

_WIDEST = 1 << 16  # a table is never wider


def build_parser() -> argparse.ArgumentParser:
    """The whole tree of arguments."""
    parser = argparse.ArgumentParser(prog="zerofx", description="ZeRO as a compiler pass.")
    parser.add_argument("--version", action="version", version=f"zerofx {version('zerofx')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = commands.add_parser(command.name, help=command.summary, description=command.summary)
        _add_common(sub, default=False)
        command.configure(sub)
        for action in completion.subparsers(sub).values():
            _add_common(action, default=argparse.SUPPRESS)  # else it would undo the outer one
        sub.set_defaults(run=command.run, parser=parser)
    return parser


def _add_common(parser: argparse.ArgumentParser, default: Any) -> None:
    flags = {"--json": "print data instead of text", "--debug": "show the traceback of an error"}
    for flag, said in flags.items():
        parser.add_argument(flag, action="store_true", default=default, help=said)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Returns:
        The exit code; usage errors leave through `SystemExit(2)` as argparse does.
    """
    args = build_parser().parse_args(argv)
    try:
        with Progress(Console(stderr=True)) as progress:
            answer: Answer = args.run(args, progress)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        print(_block(args.command, error, args.debug), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    if not answer.silent:
        _print_to_whoever_reads(answer, as_json=args.json)
    return 0 if answer.ok else 1


def _print_to_whoever_reads(answer: Answer, *, as_json: bool) -> None:
    """Print; a pipe that was closed (`| head`) has read enough."""
    try:
        _print(answer, as_json=as_json)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich leaves with 1, which means something else here
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print(answer: Answer, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_finite(answer.data), indent=2))
        return
    # Names and code are the user's, and scripts and shells read text whole: nothing is taken for
    # markup, wrapped, or cut, so that a table is as wide as it is.
    console = Console(markup=False, emoji=False, highlight=False)
    widest = console.options.update(max_width=_WIDEST)
    for each in answer.text:
        if not isinstance(each, str):
            console.width = console.measure(each, options=widest).maximum
        console.print(each, soft_wrap=True)


def _finite(data: Any) -> Any:
    """Data with null for numbers that JSON does not have, such as the rate of a perfect link."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in cast("dict[Any, Any]", data).items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in cast("list[Any]", data)]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _block(command: str, error: Exception, debug: bool) -> str:
    if isinstance(error, ZeroFxError):
        # Dynamo adds how to see its own stack, which does not say what the user does.
        said, _, _ = str(error).partition("\nSet TORCHDYNAMO_VERBOSE=1")
        return f"zerofx {command}: {said.rstrip()}"
    lines = [f"zerofx {command}: {type(error).__name__}: {str(error).strip()}"]
    if not debug:
        lines.append("Remedy: run it again with --debug to see where")
    return "\n".join(lines)
