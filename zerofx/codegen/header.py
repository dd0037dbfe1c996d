"""What an emitted file says about itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zerofx.codegen.tiles import NUM_WARPS, Tiling, codecs_of
from zerofx.ir.kernels import KernelSpec, Pack, Repack, TensorSpec, Unpack, errors_of, operand_bytes

Lines = list[str]


def header(spec: KernelSpec, tiling: Tiling, fp8: bool) -> Lines:
    """The module docstring: operands, codec, launch and the table of tensors."""
    lines = ['"""' + _title(spec), "", "Written by zerofx for one bucket; do not edit.", ""]
    lines += [f"    {name:<9}{text}" for name, text in _facts(spec, tiling, fp8)]
    if not isinstance(spec, Repack):
        lines += ["", *_table(tiling)]
    return [*(line.rstrip() for line in lines), '"""']


def _title(spec: KernelSpec) -> str:
    if isinstance(spec, Pack):
        return "Pack: tensors become parcels, quantized, in one launch."
    mean = f" the mean of {spec.num_sources} sources," if spec.num_sources > 1 else ""
    if isinstance(spec, Repack):
        return f"Repack: parcels become parcels,{mean} quantized again, in one launch."
    return f"Unpack: parcels become tensors,{mean} in one launch."


def _facts(spec: KernelSpec, tiling: Tiling, fp8: bool) -> list[tuple[str, str]]:
    read, written = codecs_of(spec)
    codec = read.name if read == written else f"{read.name}, then {written.name}"
    size = written if isinstance(spec, Pack) else read
    layout = (
        f"{tiling.num_blocks} blocks of {size.block_bytes} B, then "
        f"{size.num_slots(tiling.num_blocks)} scales" + ("" if size.symmetric else " and lows")
    )
    facts = [("codec", codec)]
    written = spec.outputs if isinstance(spec, Unpack) else spec.outputs[:1]
    facts += [("reads", _operands(spec.inputs)), ("writes", _operands(written))]
    if errors := errors_of(spec):
        facts += [("errors", f"{_operands(errors)}, read and written")]
    facts += [("parcel", layout)]
    if not isinstance(spec, Repack) and spec.parcels.num_nodes > 1:
        num_local, num_nodes = spec.parcels.num_local, spec.parcels.num_nodes
        facts += [("order", f"chunk p is row p % {num_local} * {num_nodes} + p // {num_local}")]
    launch = f"{tiling.num_programs} programs of {NUM_WARPS} warps, {tiling.rows} blocks each"
    facts += [("bytes", f"{operand_bytes(spec)} in all"), ("launch", launch)]
    device = ("device", "compute capability 8.9 or higher, for its instructions of fp8")
    return [*facts, device] if fp8 else facts


def _operands(operands: Sequence[TensorSpec]) -> str:
    """Counts by dtype and shape; tensors have their own table."""
    if len(operands) == 1 and len(operands[0][0]) > 1:
        shape, dtype = operands[0]
        return f"{_dtype(dtype)}{list(shape)}"
    return f"{len(operands)} tensors, see below"


def _table(tiling: Tiling) -> Lines:
    rows = [("", "tensor", "dtype", "elements", "chunk", "blocks", "tiles")]
    for each in tiling.stretches:
        member = each.member
        blocks = _range(each.first_block, each.num_blocks)
        tiles = _range(each.first_tile, each.num_tiles)
        kind, numel = _dtype(member.dtype), str(member.numel)
        rows.append((each.name, shown(member.name), kind, numel, str(member.chunk), blocks, tiles))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}–{first + count - 1}"


def shown(name: str) -> str:
    """A tensor's name as comments and docstrings can hold it: modules may be called anything."""
    return repr(name)[1:-1].replace('"', "'")
