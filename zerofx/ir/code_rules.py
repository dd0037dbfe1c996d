"""Rules for what travels as codes; `zerofx.ir.rules` lists them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from zerofx.ir import ops
from zerofx.ir.case import Case, Offence
from zerofx.ir.codes import sent
from zerofx.ir.facts import facts


def codes_as_stated(case: Case) -> Iterator[Offence]:
    """What travels as codes is sharded, is not resident, and sends as many bytes as it states."""
    for start in case.calls(*ops.STARTS):
        specs = [case.program.params.get(name) for name in facts(start).members]
        if not ops.codecs(start) or not all(specs):
            continue
        layouts = [spec.layout for spec in specs if spec is not None]
        gathers = ops.is_call(start, ops.UNSHARD_START)
        if any(not each.sharded or (gathers and each.resident) for each in layouts):
            yield Offence(start, f"cannot send {', '.join(ops.codecs(start))}")
            continue
        found, record = sent(case.program, start), facts(start)
        if any(getattr(record, name) != size for name, size in dataclasses.asdict(found).items()):
            yield Offence(
                start,
                f"states {record.wire_bytes} B with {record.scale_bytes} B of scales, "
                f"{record.across_bytes} B across nodes, and sends {found.wire_bytes} B with "
                f"{found.scale_bytes} B, {found.across_bytes} B across nodes",
            )
