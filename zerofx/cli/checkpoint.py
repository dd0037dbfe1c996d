"""`zerofx checkpoint inspect | convert`: what is in a checkpoint; another format of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from zerofx.checkpoint import Source, Stored, open_source, to_dcp, to_safetensors
from zerofx.cli.arguments import WEIGHT_DTYPES
from zerofx.cli.command import Answer
from zerofx.cli.progress import Progress
from zerofx.cli.units import counted, show_bytes
from zerofx.errors import ConfigError

_DTYPES = dict(zip(WEIGHT_DTYPES, (torch.float32, torch.float16, torch.bfloat16), strict=True))


def run(args: argparse.Namespace, progress: Progress) -> Answer:
    """Look, and convert if asked to."""
    if not args.path.exists():
        raise ConfigError(f"{args.path} does not exist", "name a checkpoint's folder or file")
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
    head = f"{path}: {source.kind}, {counted(len(source.files), 'file')}, {show_bytes(on_disk)}"
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
        "bytes": sum(like.nbytes for like in likes),
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
