"""Which parameters travel together: buckets by place of use and by bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import fx

from zerofx.cost.tables import MOST_BUCKET_BYTES
from zerofx.ir.facts import Facts, Role, facts
from zerofx.ir.ops import codecs, members
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec

_SHARE = 8
"""By default a bucket holds at most this part of all parameters, or memory would be no better."""

_SPLIT = 8
"""A block of layers that is this many times too large for a bucket is divided."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Collectives that become one.

    Attributes:
        name: the blocks of the model it serves: `layers.3`, `layers.2–layers.5`.
        starts: what it replaces, of one layout and codec, each of one member; in the order in which
            Dynamo found the parameters, which is that of other ranks, whatever sizes they see.
        full_bytes: size of the full values.
        reason: why it ends where it ends.
    """

    name: str
    starts: tuple[fx.Node, ...]
    full_bytes: int
    reason: str


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """Buckets of more than one parameter, in execution order."""

    buckets: tuple[Bucket, ...]


@dataclasses.dataclass
class _Run:
    """Neighbouring collectives of one block of the model."""

    block: str
    starts: list[fx.Node]
    full_bytes: int


def plan_buckets(
    program: Program, starts: Iterable[fx.Node], target_bytes: int | None, most_bytes: int
) -> BucketPlan:
    """Group collectives of one member into buckets.

    Neighbours that belong to the same repeated block stay together, so that equal layers get equal
    buckets; blocks are joined while they fit into `target_bytes`. Layouts and codecs never mix, nor
    do frozen and trainable parameters that travel as codes.

    Args:
        program: the program.
        starts: its gathers, or its reductions, in execution order.
        target_bytes: size of full values that amortises a collective's latency; 0 keeps every
            parameter alone. By default an eighth of all parameters.
        most_bytes: bound of that default.
    """
    if target_bytes is None:
        target_bytes = default_target(program.params.values(), most_bytes)
    alike: dict[tuple[Any, ...], list[tuple[fx.Node, ParamSpec]]] = {}
    for start in starts:
        spec = program.params.get(facts(start).param)
        if spec is not None and len(members(start)) == 1:
            # Frozen weights keep their codes, which those that change would have made anew.
            kind = spec.layout.handle, codecs(start), bool(codecs(start)) and spec.trainable
            alike.setdefault(kind, []).append((start, spec))
    buckets = [
        bucket
        for items in alike.values()
        for bucket in _join(
            _merge_unnumbered(_runs(program, items, target_bytes), target_bytes), target_bytes
        )
    ]
    found = {name: number for number, name in enumerate(program.params)}
    return BucketPlan(tuple(_as_found(each, found) for each in buckets if len(each.starts) > 1))


def _as_found(bucket: Bucket, found: Mapping[str, int]) -> Bucket:
    """With its members by the places in which their parameters were found."""
    starts = sorted(bucket.starts, key=lambda start: found[facts(start).param])
    return dataclasses.replace(bucket, starts=tuple(starts))


def default_target(params: Iterable[ParamSpec], most_bytes: int = MOST_BUCKET_BYTES) -> int:
    """Bytes of a bucket if nobody asks for a size: an eighth of all parameters, with a bound.

    Args:
        params: as a stage lays them out: padding counts, and so does the dtype of full values.
        most_bytes: the bound.
    """
    return min(most_bytes, sum(spec.full_bytes for spec in params) // _SHARE)


def bucket_facts(bucket: Bucket, role: Role) -> Facts:
    """What is known about the one collective of a bucket."""
    records = [facts(start) for start in bucket.starts]
    return dataclasses.replace(
        records[0],
        role=role,
        param="",
        module="",
        bucket=bucket.name,
        members=tuple(name for record in records for name in record.members),
        wire_bytes=sum(record.wire_bytes for record in records),
        exact=", ".join(dict.fromkeys(record.exact for record in records if record.exact)),
    )


def _block(spec: ParamSpec) -> str:
    """The outermost numbered ancestor, `layers.3` of `layers.3.mlp.weight`; else its module."""
    parts = spec.name.split(".")[:-1]
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def _runs(
    program: Program, items: Sequence[tuple[fx.Node, ParamSpec]], target_bytes: int
) -> list[_Run]:
    runs: list[_Run] = []
    limit = _SPLIT * target_bytes
    for start, spec in items:
        block, size = _block(spec), program.full_bytes(start)
        last = runs[-1] if runs else None
        if last is not None and last.block == block and last.full_bytes + size <= limit:
            last.starts.append(start)
            last.full_bytes += size
        else:
            runs.append(_Run(block, [start], size))
    return runs


def _merge_unnumbered(runs: Sequence[_Run], target_bytes: int) -> list[_Run]:
    """Neighbours without numbers become one as far as they fit, or as one is large, others small.

    A table of positions travels with the large table of words, and not with the first of equal
    layers, which would be unlike the others then.
    """
    merged: list[_Run] = []
    largest = 0
    for run in runs:
        last = merged[-1] if merged else None
        largest = max(largest, run.full_bytes)
        total = run.full_bytes + (last.full_bytes if last else 0)
        fits = total <= target_bytes or total - largest <= target_bytes // _SPLIT
        if last is not None and not _is_numbered(last) and not _is_numbered(run) and fits:
            name = f"{last.block.partition('–')[0]}–{run.block}"
            merged[-1] = _Run(name, [*last.starts, *run.starts], total)
        else:
            merged.append(run)
            largest = run.full_bytes
    return merged


def _is_numbered(run: _Run) -> bool:
    return any(part.isdigit() for part in run.block.split("."))


def _join(runs: Sequence[_Run], target_bytes: int) -> list[Bucket]:
    buckets: list[Bucket] = []
    current: list[_Run] = []
    for run in runs:
        total = sum(each.full_bytes for each in current) + run.full_bytes
        if current and total > target_bytes:
            buckets.append(
                _bucket(current, f"{total} B with {run.block or 'the next'} are too many")
            )
            current = []
        current.append(run)
    if current:
        buckets.append(_bucket(current, "last of its layout"))
    return buckets


def _bucket(runs: Sequence[_Run], reason: str) -> Bucket:
    starts = [start for run in runs for start in run.starts]
    blocks = [run.block or facts(run.starts[0]).param for run in runs]
    name = blocks[0] if blocks[0] == blocks[-1] else f"{blocks[0]}–{blocks[-1]}"
    return Bucket(name, tuple(starts), sum(run.full_bytes for run in runs), reason)
