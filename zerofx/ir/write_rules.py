"""Rules about memory that others read: parameters, what is gathered of them, what is sent."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zerofx.ir import ops
from zerofx.ir.case import Case, Offence
from zerofx.ir.facts import Role
from zerofx.ir.view import alias_closure
from zerofx.torch_private import is_operator


def nothing_written(case: Case) -> Iterator[Offence]:
    """No operation writes to a shard, to a full value, or to a gradient under way; views included.

    A shard is the parameter, which the optimizer alone changes; a full value may be kept for
    backward, or be the parameter itself; a reduction reads its gradients until it is waited for.
    """
    if not (writes := case.writes):
        return
    fulls = case.calls(ops.UNSHARD, ops.UNSHARD_WAIT)
    for source in (*case.program.with_role(Role.SHARD), *fulls):
        for alias in alias_closure(source):
            for user in alias.users:
                if alias in writes.get(user, ()):
                    yield Offence(user, f"writes to {case.name(source)}", source)
    for start in case.calls(ops.REDUCE_START):
        for grad in ops.gradients(start):
            for user in (user for alias in alias_closure(grad) for user in alias.users):
                if user in writes and case.place[start] < case.place[user] < case.read_until(start):
                    yield Offence(user, f"writes to what {case.name(start)} is sending", start)


def read_before_written(case: Case) -> Iterator[Offence]:
    """What the model writes to an input, a buffer say, is written after all reads of it."""
    for node, written in case.writes.items():
        for source in written if not ops.is_call(node, ops.SYNC_BUFFERS) else ():
            if source.op != "placeholder":
                continue
            for user in (user for alias in alias_closure(source) for user in alias.users):
                late = case.place[user] > case.place[node] and user.op != "output"
                writes = source in case.writes.get(user, ())
                if late and node not in user.all_input_nodes and not writes:
                    yield Offence(user, f"reads {case.name(source)} after a write to it", source)


def known_operations(case: Case) -> Iterator[Offence]:
    """Operations on tensors are torch's or registered with it: others may write to anything."""
    for node in case.place:
        if node.op in ("placeholder", "output", "get_attr") or is_operator(node.target):
            continue
        if any(isinstance(each.meta.get("val"), Tensor) for each in node.all_input_nodes):
            yield Offence(node, "is no operation that torch knows")
