"""Sizes, rates and speeds as people write them.

Powers of ten unless written with an i: `80GB` is 80·10⁹ bytes, `80GiB` 80·2³⁰. In rates the case
of the b tells bytes from bits, as on data sheets of links; prefixes are of any case.
"""

from __future__ import annotations

import argparse
import math
import re

_PREFIX = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*"
_SIZE = re.compile(_NUMBER + r"([kmgtp]?)(i?)(b?)", re.I)
_RATE = re.compile(_NUMBER + r"([kmgtp]?)(i?)(bits?|bytes?|(?-i:[bB]))?(?:/s|ps)?", re.I)
_ALMOST = 0.9995  # of the next larger unit: three digits of it are 1.00
_SPEED = re.compile(_NUMBER + r"([kmgtp]?)(?:flops?)?(?:/s)?", re.I)


def size(text: str) -> int:
    """Bytes of `80GB`, `16 GiB`, `24e9`.

    Raises:
        argparse.ArgumentTypeError: it is no size.
    """
    match = _match(_SIZE, text, "a size such as 80GB, 80GiB or 24e9")
    return int(_scaled(match[1], match[2], binary=bool(match[3])))


def rate(text: str) -> float:
    """Bytes per second of `25GB/s`, `25GBps`, `100gbit`, `100Gb/s`, `100Gbps`, `12.5e9`.

    Raises:
        argparse.ArgumentTypeError: it is no rate above 0.
    """
    match = _match(_RATE, text, "a rate such as 25GB/s, 100Gbit/s (b: bits, B: bytes) or 12.5e9")
    unit = match[4] or "bytes"
    bits = unit == "b" or unit.lower().startswith("bit")
    return _above_0(text, _scaled(match[1], match[2], binary=bool(match[3])) / (8 if bits else 1))


def speed(text: str) -> float:
    """Operations per second of `312T`, `312 TFLOPS`, `5e10`.

    Raises:
        argparse.ArgumentTypeError: it is no speed above 0.
    """
    match = _match(_SPEED, text, "a speed such as 312T or 5e10")
    return _above_0(text, _scaled(match[1], match[2], binary=False))


def latency(text: str) -> float:
    """Seconds of `20e-6`; 0 is a link that starts at once.

    Raises:
        argparse.ArgumentTypeError: it is no finite number from 0 on.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 on, as 20e-6")
    return seconds


def show_bytes(count: float) -> str:
    """`31.4 GB`: three digits, powers of ten as in the ZeRO paper."""
    for prefix in ("P", "T", "G", "M", "k"):
        factor = 1000.0 ** _PREFIX[prefix.lower()]
        if count >= _ALMOST * factor:
            return f"{_digits(count / factor)} {prefix}B"
    return f"{int(count)} B"


def show_rate(per_second: float) -> str:
    """`25.0 GB/s`; `no limit` if it is infinite."""
    return "no limit" if math.isinf(per_second) else f"{show_bytes(per_second)}/s"


def show_count(count: float) -> str:
    """`7.50 B` of parameters, in the paper's letters."""
    for letter, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= _ALMOST * factor:
            return f"{_digits(count / factor)} {letter}"
    return str(int(count))


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def show_seconds(seconds: float) -> str:
    """`12.3 ms`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= _ALMOST * factor:
            return f"{_digits(seconds / factor)} {unit}"
    return f"{_digits(seconds / 1e-6)} µs"


def _digits(value: float) -> str:
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


def _match(pattern: re.Pattern[str], text: str, wanted: str) -> re.Match[str]:
    match = pattern.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return match


def _above_0(text: str, value: float) -> float:
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _scaled(number: str, prefix: str, *, binary: bool) -> float:
    try:
        value = float(number)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{number!r} is not a number") from error
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{number!r} is too large")
    return value * (1024.0 if binary else 1000.0) ** _PREFIX[prefix.lower()]
