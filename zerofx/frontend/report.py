"""What passes made of a program, as data for machines: `report.json` of a dump.

The schema has a version, which changes whenever a key changes its name or meaning. Values are the
same on every run and, but for the shapes of shards, on every rank.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from zerofx.cost.machine import already_whole, bytes_sent
from zerofx.cost.micro_batches import ONE_MICRO_BATCH
from zerofx.frontend.breaks import Break
from zerofx.frontend.micro_programs import programs_of_micro_batches
from zerofx.frontend.predict import (
    Prediction,
    Setting,
    collective_seconds,
    describe_memory,
    describe_nodes,
    describe_setting,
    describe_timeline,
    round_seconds,
)
from zerofx.ir import ops
from zerofx.ir.codes import wire_dtype
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.text import node_names
from zerofx.ir.verify import peak_full_bytes
from zerofx.passes.base import Pass
from zerofx.passes.buckets import Bucket
from zerofx.passes.schedule import SchedulePlan

VERSION = 2

Json = Any
"""What `json.dumps` takes."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """A pass that ran.

    Attributes:
        ran: the pass.
        plan: what it returned.
        names: what the printer called the nodes before and after it.
        changed: whether the text of the program changed.
    """

    ran: Pass
    plan: Any
    names: Mapping[fx.Node, str]
    changed: bool


def describe_program(
    program: Program, passes: Sequence[Ran], found: Prediction | None
) -> dict[str, Json]:
    """The entry of one finished program.

    Args:
        program: after its last pass.
        passes: those that ran.
        found: what it will take and hold; `None` for a joint program, which never runs.
    """
    names = node_names(program)
    inputs = program.graph.find_nodes(op="placeholder")
    starts = program.calls(*ops.STARTS)
    return {
        "region": program.region.value,
        "inputs": [_describe_input(node, names[node]) for node in inputs],
        "outputs": [printable(value, names) for value in program.outputs],
        "num_user_outputs": program.num_user_outputs,
        "passes": [_describe_pass(each) for each in passes],
        "buckets": list(_describe_buckets(program, starts, passes)),
        "collectives": list(_describe_collectives(program, starts, passes, found)),
        "kept": [facts(node).param for node in program.calls(ops.KEEP)],
        "secondary": _secondary(program),
        "wire_bytes": sum(facts(start).wire_bytes for start in starts),
        "across_nodes_bytes": sum(map(program.bytes_across_nodes, starts)),
        "peak_full_bytes": peak_full_bytes(program),
        "nodes": describe_nodes(program),
        "timeline": describe_timeline(found) if found else None,
        "memory": describe_memory(found) if found else None,
    }


def describe_graph(
    number: int,
    stage: int,
    programs: Sequence[dict[str, Json]],
    setting: Setting,
    ended: Break | None,
) -> dict[str, Json]:
    """The whole report of one Dynamo graph.

    Args:
        number: which graph of this process.
        stage: ZeRO stage.
        programs: entries, in the order in which they were finished.
        setting: where they run.
        ended: where the graph ends early; `None` if its function returned.
    """
    return {
        "version": VERSION,
        "graph": number,
        "stage": stage,
        "wire_bytes_per_step": wire_bytes_per_step(programs),
        "setting": describe_setting(setting),
        "break": None if ended is None else dataclasses.asdict(ended),
        "programs": list(programs),
    }


def wire_bytes_per_step(programs: Sequence[dict[str, Json]]) -> int | None:
    """Bytes that a rank sends from one optimizer step to the next; `None` without a backward.

    In all its micro-batches. What forward keeps, backward does not gather again. Stages 1 and 2
    gather once per optimizer step, and what is frozen at most once, which is not counted.
    """
    found = {each["region"]: each for each in programs}
    if Region.BACKWARD.value not in found:
        return None
    both = found[Region.FORWARD.value], found[Region.BACKWARD.value]
    return sum(start["bytes_per_step"] for each in both for start in each["collectives"])


def printable(value: Any, names: Mapping[fx.Node, str]) -> Json:
    """Plans as JSON: nodes by their printed names, dataclasses as objects, the rest by its type."""
    if isinstance(value, fx.Node):
        return names.get(value, value.name)
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {field.name: printable(getattr(value, field.name), names) for field in fields}
    if isinstance(value, Mapping):
        return {str(printable(key, names)): printable(item, names) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((printable(item, names) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [printable(item, names) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, (float, complex, torch.dtype, torch.SymInt)):
        return str(value).removeprefix("torch.")
    return type(value).__name__


def _secondary(program: Program) -> list[str]:
    """Parameters of which a forward leaves secondary shards."""
    coded = filter(ops.keeps_codes, program.calls(ops.UNSHARD_START))
    return [facts(node).param for node in program.calls(ops.KEEP_SHARD)] + [
        name for start in coded for name in facts(start).members
    ]


def _describe_input(node: fx.Node, name: str) -> dict[str, Json]:
    record, value = facts(node), node.meta.get("val")
    tensor = isinstance(value, Tensor)
    return {
        "name": name,
        "role": record.role.value,
        "param": record.param,
        "dtype": printable(value.dtype, {}) if tensor else None,
        "shape": [n if isinstance(n, int) else str(n) for n in value.shape] if tensor else None,
    }


def _describe_pass(each: Ran) -> dict[str, Json]:
    kind = type(each.ran)
    return {
        "name": each.ran.name,
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "options": printable(each.ran, {}),
        "numerics": each.ran.numerics,
        "mandatory": each.ran.mandatory,
        "changed": each.changed,
        "plan": printable(each.plan, each.names),
    }


def _describe_collectives(
    program: Program, starts: Sequence[fx.Node], passes: Sequence[Ran], found: Prediction | None
) -> Iterator[dict[str, Json]]:
    names = node_names(program)
    seconds = collective_seconds(found) if found else {}
    in_a_step = _bytes_in_a_step(program, found)
    late = {
        start: why
        for each in passes
        if isinstance(each.plan, SchedulePlan)
        for start, why in each.plan.reasons
    }
    for start in starts:
        record = facts(start)
        busy, exposed = seconds.get(start, (None, None))
        yield {
            "node": names[start],
            "kind": "unshard" if ops.is_call(start, ops.UNSHARD_START) else "reduce",
            "bucket": record.bucket,
            "members": [
                {"param": name, "full_bytes": program.params[name].full_bytes}
                for name in record.members
            ],
            "layout": program.params[record.members[0]].layout.name if record.members else "",
            "axis": record.axis,
            "codecs": list(ops.codecs(start)),
            "wire_dtype": wire_dtype(program, start),
            "wire_bytes": record.wire_bytes,
            "bytes_per_step": in_a_step[start],
            "across_nodes_bytes": program.bytes_across_nodes(start),
            "scale_bytes": record.scale_bytes,
            "exact": record.exact,
            "by": record.origin,
            "seconds": round_seconds(busy),
            "exposed_seconds": round_seconds(exposed),
            "starts_late": late.get(start, ""),
        }


def _bytes_in_a_step(program: Program, found: Prediction | None) -> dict[fx.Node, int]:
    """What a rank sends in each collective, in all micro-batches."""
    whole = already_whole(program, found.kept if found else frozenset())
    micro_batches = ONE_MICRO_BATCH
    if found is not None and program.region is not Region.INFERENCE:
        micro_batches = found.micro_batches
    totals = dict.fromkeys(program.calls(*ops.STARTS), 0.0)
    for part, number in programs_of_micro_batches(program, micro_batches.number):
        for start, there in zip(totals, part.calls(*ops.STARTS), strict=True):
            sent = bytes_sent(part, there, whole)
            totals[start] += micro_batches.traveled(part, there, sent, number).wire_bytes
    return {start: round(total) for start, total in totals.items()}


def _describe_buckets(
    program: Program, starts: Sequence[fx.Node], passes: Sequence[Ran]
) -> Iterator[dict[str, Json]]:
    """Collectives of several members, with the reasons that the plans give."""
    reasons = {
        (bucket.name, tuple(name for start in bucket.starts for name in facts(start).members)): (
            bucket.reason
        )
        for each in passes
        for bucket in _buckets_in(each.plan)
    }
    for start in starts:
        record = facts(start)
        if len(record.members) < 2:
            continue
        yield {
            "name": record.bucket,
            "kind": "unshard" if ops.is_call(start, ops.UNSHARD_START) else "reduce",
            "members": list(record.members),
            "full_bytes": sum(program.params[name].full_bytes for name in record.members),
            "wire_bytes": record.wire_bytes,
            "reason": reasons.get((record.bucket, record.members), ""),
        }


def _buckets_in(plan: Any) -> Iterator[Bucket]:
    if isinstance(plan, Bucket):
        yield plan
    elif isinstance(plan, (list, tuple)):
        for each in plan:
            yield from _buckets_in(each)
    elif dataclasses.is_dataclass(plan) and not isinstance(plan, type):
        for field in dataclasses.fields(plan):
            yield from _buckets_in(getattr(plan, field.name))
