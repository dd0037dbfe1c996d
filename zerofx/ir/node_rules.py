"""Rules about gathers that stay inside a node."""

from __future__ import annotations

from collections.abc import Iterator

from zerofx.ir import ops
from zerofx.ir.case import Case, Offence
from zerofx.ir.facts import NODE, facts
from zerofx.ir.spec import Region


def inside_the_node(case: Case) -> Iterator[Offence]:
    """ZeRO++ §3.2: backward gathers inside the node what forward left there as secondary shards."""
    for start in case.calls(ops.UNSHARD_START):
        if facts(start).axis != NODE:
            continue
        if case.program.region is not Region.BACKWARD:
            yield Offence(start, "gathers inside the node before any rank of it has new values")
        for name in facts(start).members:
            spec = case.program.params.get(name)
            if spec is None or not spec.layout.secondary:
                yield Offence(start, f"gathers {name} inside the node, without secondary shards")
    kept = {facts(node).param for node in case.calls(ops.KEEP_SHARD)}
    if case.program.region is Region.FORWARD and kept:
        for full in case.gathered:
            if facts(full).param in case.program.read_later - kept:
                yield Offence(full, "leaves no secondary shard, which backward needs")
