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
            elif ops.codecs(start) and not spec.layout.secondary_codes:
                yield Offence(start, f"gathers codes of {name}, of which its node holds numbers")
    kept = {facts(node).param for node in case.calls(ops.KEEP_SHARD)}
    for start in filter(ops.keeps_codes, case.calls(ops.UNSHARD_START)):
        kept.update(facts(start).members)
        if not ops.codecs(start) or case.program.region is not Region.FORWARD:
            yield Offence(start, "keeps codes, which only a forward that gathers codes can")
    if case.program.region is Region.FORWARD and kept:
        for full in case.gathered:
            if facts(full).param in case.program.read_later - kept:
                yield Offence(full, "leaves no secondary shard, which backward needs")
