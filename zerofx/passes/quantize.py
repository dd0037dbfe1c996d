"""Which parameters travel as codes, and why the others do not."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import fx

from zerofx.ir.codes import note_sent
from zerofx.ir.edit import Editor
from zerofx.ir.facts import facts
from zerofx.ir.parcels import DTYPES, Codec
from zerofx.ir.program import Program
from zerofx.ir.spec import ParamSpec


@dataclasses.dataclass(frozen=True)
class Exact:
    """A parameter that travels as it is.

    Attributes:
        param: its name.
        reason: why.
    """

    param: str
    reason: str


@dataclasses.dataclass(frozen=True)
class QuantizePlan:
    """What becomes of each parameter of the program.

    Attributes:
        quantized: collectives of one member each, which will send codes.
        codecs: names of their codecs.
        exact: the parameters of all others.
    """

    quantized: tuple[fx.Node, ...]
    codecs: tuple[str, ...]
    exact: tuple[Exact, ...]


def plan_codes(
    program: Program,
    starts: Iterable[fx.Node],
    codecs: Sequence[Codec],
    patterns: Sequence[str],
    dtype_of: Callable[[fx.Node], torch.dtype],
) -> QuantizePlan:
    """Decide for each parameter.

    A parameter has the same answer in every program: it depends on its specification alone.

    Args:
        program: the program.
        starts: its gathers, or its reductions.
        codecs: of the only hop, or of both.
        patterns: globs of what stays exact: names of parameters, or of their modules' classes.
        dtype_of: what a collective would send if it were exact.
    """
    reasons = {
        spec.name: reason_for_exact(spec, codecs, patterns)
        for spec in sorted(program.params.values(), key=lambda spec: spec.index)
    }
    quantized: list[fx.Node] = []
    for start in starts:
        name = facts(start).param
        if reasons.get(name) == "" and dtype_of(start) not in DTYPES:
            reasons[name] = f"{dtype_of(start)} has no codes"
        if reasons.get(name) == "":
            quantized.append(start)
    exact = tuple(Exact(name, reason) for name, reason in reasons.items() if reason)
    return QuantizePlan(tuple(quantized), tuple(codec.name for codec in codecs), exact)


def send_codes(edit: Editor, plan: QuantizePlan, starts: Iterable[fx.Node], codecs: object) -> None:
    """Give each quantized start its codecs, and all other ones the reason why they have none."""
    reasons = {each.param: each.reason for each in plan.exact}
    chosen = set(plan.quantized)
    for start in starts:
        record = facts(start)
        if start not in chosen:
            edit.note(start, exact=reasons.get(record.param, ""))
            continue
        made = edit.call_before(start, start.target, (*start.args, codecs), record)
        edit.replace(start, made)
        note_sent(edit, made)


def reason_for_exact(spec: ParamSpec, codecs: Sequence[Codec], patterns: Sequence[str]) -> str:
    """Why a parameter stays exact; empty if it does not."""
    if not spec.layout.sharded:
        return "replicated"
    if len(spec.shape) < 2:
        return "one dimension"
    names = [each.lower() for each in (spec.name, *spec.tied, *spec.owners)]
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(name, pattern.lower()) for name in names):
            return f"as {pattern}"
    if spec.dtype not in DTYPES:
        return f"{spec.dtype} has no codes"
    chunk = spec.padded_numel // spec.layout.num_shards
    itemsize = min(spec.dtype.itemsize, spec.full_dtype.itemsize)
    for codec in codecs:
        if codec.parcel_bytes(-(-chunk // codec.block)) >= chunk * itemsize:
            return f"{chunk} numbers a rank"
    return ""
