"""The command line that the training programs share."""

import argparse
from pathlib import Path
from typing import Any

from kit.assets import default_cache


def training_parser(
    doc: str | None, *, unit: str, tiny: str, **defaults: Any
) -> argparse.ArgumentParser:
    """A parser of what every training program can be asked.

    Args:
        doc: of the program; its first line describes it.
        unit: what text is counted in, as `tokens`.
        tiny: what `--tiny` trains in place of the real thing.
        defaults: of `steps`, `length`, `batch`, `lr` and `out`.
    """
    parser = argparse.ArgumentParser(
        description=(doc or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    add("--inner", choices=("inductor", "eager"), default="inductor")
    add("--steps", type=int, help="optimizer steps in all")
    add("--length", type=_count, help=f"{unit} in a window")
    add("--batch", type=_count, help="windows per rank and backward")
    add("--lr", type=float, help="highest learning rate")
    add("--seed", type=int, default=0)
    add("--out", type=Path)
    add("--cache", type=Path, default=default_cache())
    add("--tiny", action="store_true", help=f"{tiny}, no download")
    parser.set_defaults(**defaults)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)
