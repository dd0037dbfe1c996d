"""Show how a `ds_config.json` is understood, or all keys as the manual's table.

python -m zerofx.integrations.deepspeed ds_config.json --auto optimizer.params.lr=3e-5
python -m zerofx.integrations.deepspeed
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from zerofx.errors import ConfigError, ZeroFxError
from zerofx.integrations.deepspeed.settings import KEYS
from zerofx.integrations.deepspeed.translate import from_deepspeed


def key_table() -> str:
    """All keys in Markdown."""
    lines = ["| key | | what becomes of it |", "|---|---|---|"]
    lines += [f"| `{key.path}` | {key.kind} | {key.meaning} |" for key in KEYS.values()]
    return "\n".join(lines) + "\n"


def _assignment(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError as error:
        raise ConfigError(f"--auto {text}: {error}", "write KEY=VALUE, VALUE as in JSON") from None


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        prog="python -m zerofx.integrations.deepspeed",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("file", nargs="?", help="a ds_config.json; without it: all keys")
    parser.add_argument("--world-size", type=int, help="number of ranks")
    parser.add_argument("--auto", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--leave-out", action="append", default=[], metavar="KEY")
    args = parser.parse_args(argv)
    if args.file is None:
        print(key_table(), end="")
        return
    try:
        auto = dict(map(_assignment, args.auto))
        how = {"auto": auto, "leave_out": args.leave_out, "world_size": args.world_size}
        print(from_deepspeed(args.file, **how))
    except ZeroFxError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
