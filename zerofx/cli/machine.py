"""Options that say where a model will train."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.machine import DATACENTER_GPU, Machine, loads_machine
from zerofx.errors import ConfigError

_MOST_RANKS = 4096
_MOST_BATCH = _MOST_LENGTH = 1 << 20


def machine_of(args: argparse.Namespace, otherwise: Machine = DATACENTER_GPU) -> Machine:
    """What was said; else what `--machine` says, and `otherwise` for what nobody says.

    Raises:
        ConfigError: the file of `--machine` cannot be read.
    """
    found = otherwise if args.machine is None else _read(Path(args.machine))
    roofline, link = found.roofline, found.link
    if args.link is not None or args.latency is not None:
        rate = link.bytes_per_second if args.link is None else args.link
        found = found.with_link(Link(rate, link.latency if args.latency is None else args.latency))
    return dataclasses.replace(
        found,
        device=args.device or found.device,
        roofline=Roofline(
            roofline.flops if args.flops is None else args.flops,
            roofline.bytes_per_second if args.bandwidth is None else args.bandwidth,
        ),
    )


def _read(path: Path) -> Machine:
    try:
        return loads_machine(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--machine {path}: {error}",
            "make the file with torchrun --nproc-per-node 2 -m zerofx bench machine",
        ) from error


def num_ranks_of(args: argparse.Namespace, otherwise: int = 8) -> int:
    """`--world-size`, or `otherwise`.

    Raises:
        ConfigError: it is out of range.
    """
    value: int = otherwise if args.world_size is None else args.world_size
    _check_range("--world-size", value, _MOST_RANKS)
    return value


def check_inputs(batch: int, length: int) -> None:
    """Refuse sizes of inputs that are out of range.

    Raises:
        ConfigError: one is; the message names its option.
    """
    _check_range("--batch", batch, _MOST_BATCH)
    _check_range("--length", length, _MOST_LENGTH)


def _check_range(option: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise ConfigError(f"{option} {value} is not allowed", f"use 1 to {most}")
