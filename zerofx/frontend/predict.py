"""What a finished program will take and hold, as data for machines: parts of `report.json`.

Seconds are rounded to nanoseconds, and symbolic sizes count as they were when traced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from zerofx.cost.compute import num_flops, value_bytes
from zerofx.cost.lifetimes import KINDS, Lifetime, lifetimes, live_at, live_at_each_node
from zerofx.cost.link import Link
from zerofx.cost.liveness import NOTHING_HELD, Held, held_after
from zerofx.cost.machine import Machine
from zerofx.cost.micro_batches import ONE_MICRO_BATCH, MicroBatches
from zerofx.frontend.views import timeline_of
from zerofx.ir import ops
from zerofx.ir.facts import facts
from zerofx.ir.program import Program
from zerofx.ir.spec import Region
from zerofx.ir.text import node_lines, node_names
from zerofx.ir.view import aliased_inputs
from zerofx.sim.timeline import Timeline

Json = Any
_KINDS = {
    ops.UNSHARD: "gather",
    ops.UNSHARD_START: "gather",
    ops.REDUCE_GRAD: "reduce",
    ops.REDUCE_START: "reduce",
    ops.UNSHARD_WAIT: "wait",
    ops.REDUCE_WAIT: "wait",
    ops.FREE: "free",
    ops.KEEP: "keep",
    ops.KEEP_SHARD: "keep",
    ops.SYNC_BUFFERS: "sync",
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where the programs of a graph run.

    Attributes:
        machine: of each rank.
        num_ranks: W.
        fused: whether kernels are fused, as Inductor does.
        micro_batches: of a step.
    """

    machine: Machine
    num_ranks: int
    fused: bool
    micro_batches: MicroBatches = ONE_MICRO_BATCH


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One program, run in simulated time.

    Attributes:
        program: after its last pass.
        timeline: when its nodes run.
        lives: what it holds.
        kept: of a backward program, parameters that forward left whole.
        micro_batches: of a step.
    """

    program: Program
    timeline: Timeline
    lives: Sequence[Lifetime]
    kept: frozenset[str] = frozenset()
    micro_batches: MicroBatches = ONE_MICRO_BATCH


def predict(program: Program, setting: Setting, before: Held = NOTHING_HELD) -> Prediction:
    """Run a finished program in simulated time.

    Args:
        program: after its last pass; not a joint one.
        setting: where it runs.
        before: of a backward program, what forward left behind.
    """
    machine, fused = setting.machine, setting.fused
    kept = frozenset(before.kept)
    timeline = timeline_of(program, machine, kept, fused=fused)
    lives = lifetimes(program, machine.algorithms, fused=fused, before=before)
    return Prediction(program, timeline, lives, kept, setting.micro_batches)


def left_by(program: Program, setting: Setting) -> Held:
    """What a forward program leaves for its backward; nothing, for any other one."""
    if program.region is not Region.FORWARD:
        return NOTHING_HELD
    return held_after(program, setting.machine.algorithms, fused=setting.fused)


def describe_setting(setting: Setting) -> dict[str, Json]:
    """What predictions stand on."""
    machine, links = setting.machine, setting.machine.links
    return {
        "device": machine.device,
        "num_ranks": setting.num_ranks,
        "fused": setting.fused,
        "flops": machine.roofline.flops,
        "memory_bytes_per_second": machine.roofline.bytes_per_second,
        "gathers": _describe_link(links["all_gather"]),
        "reductions": _describe_link(links["reduce_scatter"]),
        "all_reduces": _describe_link(links["all_reduce"]),
        "all_to_alls": _describe_link(links["all_to_all"]),
        "link_measured": machine.measured,
    }


def describe_nodes(program: Program) -> list[dict[str, Json]]:
    """One row for each node but the output, in execution order."""
    names = node_names(program)
    rows: list[dict[str, Json]] = []
    for node, text in node_lines(program).items():
        record = facts(node)
        rows.append(
            {
                "name": names[node],
                "kind": _kind(node),
                "op": _op(node),
                "text": text,
                "module": record.module or record.param.rpartition(".")[0],
                "params": list(record.members) or ([record.param] if record.param else []),
                "bucket": record.bucket,
                "by": record.origin,
                "flops": num_flops(node) if node.op == "call_function" else 0,
                "bytes": value_bytes(node.meta.get("val")),
                "wire_bytes": record.wire_bytes,
            }
        )
    return rows


def collective_seconds(found: Prediction) -> dict[fx.Node, tuple[float, float]]:
    """For each collective, by its start: seconds on the link, and those without computation."""
    return {
        span.node: (span.end - span.begin, exposed) for span, exposed in found.timeline.exposure()
    }


def describe_timeline(found: Prediction) -> dict[str, Json]:
    """Spans of one program and their sums."""
    timeline, names = found.timeline, node_names(found.program)
    compute = timeline.compute_seconds
    return {
        "seconds": round_seconds(timeline.seconds),
        "compute_seconds": round_seconds(compute),
        "link_seconds": round_seconds(timeline.busy_seconds),
        "exposed_seconds": round_seconds(timeline.seconds - compute),
        "spans": [
            {
                "node": names[ops.started_by(span.node) if span.stream == "stall" else span.node],
                "stream": span.stream,
                "begin": round_seconds(span.begin),
                "end": round_seconds(span.end),
            }
            for span in timeline.spans
            if span.end > span.begin
        ],
    }


def describe_memory(found: Prediction) -> dict[str, Json]:
    """The curve of one program, and all that lives at its peak."""
    nodes = list(found.program.graph.nodes)
    names, lines = node_names(found.program), node_lines(found.program)
    rows = live_at_each_node(found.lives, len(nodes))
    totals = rows.sum(axis=1)
    peak = int(totals.argmax())
    changes = [i for i in range(len(nodes)) if i == 0 or (rows[i] != rows[i - 1]).any()]
    issued = found.timeline.issued
    return {
        "peak_bytes": int(totals[peak]),
        "peak_node": names.get(nodes[peak], "output"),
        "peak_second": round_seconds(issued[nodes[peak]]),
        "columns": ["second", *KINDS],
        "curve": [[round_seconds(issued[nodes[i]]), *map(int, rows[i])] for i in changes],
        "at_peak": [_describe_life(each, names, lines) for each in live_at(found.lives, peak)],
    }


def _describe_life(
    each: Lifetime, names: Mapping[fx.Node, str], lines: Mapping[fx.Node, str]
) -> dict[str, Json]:
    if each.node is None:
        name = each.param or "left by forward, read by nobody here"
        return {"name": name, "kind": each.kind, "bytes": each.num_bytes, "module": "", "text": ""}
    prefix = {"gathered": "full.", "gradients": "grad."}.get(each.kind, "")
    return {
        "name": prefix + each.param if each.param else names[each.node],
        "kind": each.kind,
        "bytes": each.num_bytes,
        "module": facts(each.node).module or each.param.rpartition(".")[0],
        "text": lines[each.node],
    }


def _describe_link(link: Link) -> dict[str, Json]:
    speed = link.bytes_per_second
    finite = None if math.isinf(speed) else speed
    return {"bytes_per_second": finite, "latency": link.latency}


def _kind(node: fx.Node) -> str:
    if node.op != "call_function":
        return "input" if node.op == "placeholder" else "constant"
    target: Any = node.target
    return _KINDS.get(target) or ("view" if aliased_inputs(node) else "compute")


def _op(node: fx.Node) -> str:
    if node.op != "call_function":
        return facts(node).role.value
    target: Any = node.target
    return str(getattr(target, "__name__", target)).removesuffix(".default")


def round_seconds(seconds: float | None) -> float | None:
    """To nanoseconds."""
    return None if seconds is None else round(seconds, 9)
