"""`zerofx checkpoint inspect | convert`: what is in a checkpoint; another format of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from zerofx.checkpoint import Source, Stored, open_source, to_dcp, to_safetensors
from zerofx.cli.command import Answer, Command
from zerofx.cli.progress import Progress
from zerofx.cli.units import show_bytes
from zerofx.errors import ConfigError

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="inspect|convert")
    inspect = actions.add_parser("inspect", help="what is in it; fails if files are damaged")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    convert = actions.add_parser("convert", help="write it in another format")
    for sub in (inspect, convert):
        sub.add_argument("path", type=Path, help="of DCP (zerofx, FSDP2), DeepSpeed, safetensors")
    convert.add_argument("target", type=Path, help="folder to write; must not exist")
    convert.add_argument(
        "--to",
        choices=("dcp", "safetensors"),
        default="dcp",
        help="dcp: model and optimizer, for zerofx.checkpoint.load; safetensors: weights alone",
    )
    convert.add_argument("--dtype", choices=_DTYPES, help="of the weights in safetensors")
    convert.add_argument(
        "--prefix", default="model.", help="of the tensors that are weights (default: model.)"
    )


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Look, and convert if asked to."""
    progress.step(f"look at {args.path}")
    source = open_source(args.path)
    if args.action == "inspect":
        return _answer(args.path, source, list_tensors=args.tensors)
    if args.target.exists():
        raise ConfigError(f"{args.target} exists", "name a folder that does not")
    progress.expect(len(source.tensors()))
    if args.to == "dcp":
        if args.dtype is not None:
            raise ConfigError("--dtype is for --to safetensors", "leave it out: DCP keeps masters")
        to_dcp(source, args.target, progress.step)
    else:
        dtype = _DTYPES.get(args.dtype)
        to_safetensors(source, args.target, progress.step, prefix=args.prefix, dtype=dtype)
    return _answer(args.target, open_source(args.target), list_tensors=False)


def _answer(path: Path, source: Source, *, list_tensors: bool) -> Answer:
    parts: dict[str, list[Stored]] = {}
    for name, stored in source.tensors().items():
        parts.setdefault(name.partition(".")[0], []).append(stored)
    on_disk = sum(file.stat().st_size for file in source.files)
    data: dict[str, Any] = {
        "path": str(path),
        "format": source.format,
        "kind": source.kind,
        "files": len(source.files),
        "bytes_on_disk": on_disk,
        "parts": {name: _totals(values) for name, values in parts.items()},
    }
    table = _table("part", "tensors", "elements", "bytes", "dtypes")
    for name, total in data["parts"].items():
        figures = (str(total["tensors"]), f"{total['elements']:,}", show_bytes(total["bytes"]))
        table.add_row(name, *figures, ", ".join(total["dtypes"]))
    head = f"{path}: {source.kind}, {len(source.files)} files, {show_bytes(on_disk)}"
    if not list_tensors:
        return Answer(data, (head, table))
    listed = _table("tensor", "shape", "dtype")
    data["tensors"] = {}
    for name, stored in source.tensors().items():
        shape, dtype = list(stored.like.shape), _show(stored.like.dtype)
        data["tensors"][name] = {"shape": shape, "dtype": dtype}
        listed.add_row(name, str(shape), dtype)
    return Answer(data, (head, table, "", listed))


def _totals(values: list[Stored]) -> dict[str, Any]:
    likes = [stored.like for stored in values]
    return {
        "tensors": len(likes),
        "elements": sum(like.numel() for like in likes),
        "bytes": sum(like.numel() * like.element_size() for like in likes),
        "dtypes": sorted({_show(like.dtype) for like in likes}),
    }


def _show(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    for column in columns:
        right = column in ("tensors", "elements", "bytes")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    return table


COMMAND = Command("checkpoint", "what is in a checkpoint; another format of it", configure, run)
