"""The rules: each a sentence of the ZeRO paper or of the design, and a line of `RULES`."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator

from torch import Tensor, fx

from zerofx.ir import ops
from zerofx.ir.case import Case, Offence
from zerofx.ir.code_rules import codes_as_stated
from zerofx.ir.facts import Role, facts
from zerofx.ir.gradient_rules import (
    every_gradient_reduced,
    moved,
    one_reduction,
    own_gradient,
    reduced_before,
)
from zerofx.ir.node_rules import inside_the_node
from zerofx.ir.return_rules import nothing_full_returned, nothing_full_saved
from zerofx.ir.spec import Region
from zerofx.ir.value_rules import same_border, same_values
from zerofx.ir.view import identity_source, only_returned
from zerofx.ir.write_rules import known_operations, nothing_written, read_before_written

_SHARD_ARGUMENT = {
    ops.UNSHARD: 0,
    ops.UNSHARD_WAIT: 1,
    ops.KEEP: 1,
    ops.KEEP_SHARD: 1,
    ops.REDUCE_GRAD: 1,
    ops.REDUCE_WAIT: 1,
}


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule: its name, the function that finds offences, and the remedy."""

    name: str
    check: Callable[[Case], Iterator[Offence]]
    remedy: str


def read_in_order(case: Case) -> Iterator[Offence]:
    """A value exists before it is read."""
    for node, place in case.place.items():
        for source in node.all_input_nodes:
            if case.place[source] >= place:
                yield Offence(node, f"reads {case.name(source)} before it exists", source)


def one_wait(case: Case) -> Iterator[Offence]:
    """Every member of a collective is waited for exactly once, before all its readers."""
    pairs = ((ops.UNSHARD_START, ops.UNSHARD_WAIT), (ops.REDUCE_START, ops.REDUCE_WAIT))
    for start_op, wait_op in pairs:
        for start in case.calls(start_op):
            waits = [user for user in start.users if ops.is_call(user, wait_op)]
            waited = collections.Counter(wait.args[1] for wait in waits)
            for shard, name in _members(start):
                if waited[shard] != 1:
                    yield Offence(
                        start, f"is waited for {waited[shard]} times, not once, by {name}"
                    )
            for user in start.users:
                if user not in waits:
                    yield Offence(user, f"reads {case.name(start)} before the wait", start)
        for wait in case.calls(wait_op):
            start = wait.args[0]
            if not isinstance(start, fx.Node) or not ops.is_call(start, start_op):
                yield Offence(wait, "waits for something that was not started")
            elif wait.args[1] not in ops.members(start):
                yield Offence(wait, f"waits for no member of {case.name(start)}", start)


def waits_in_order(case: Case) -> Iterator[Offence]:
    """Collectives of one kind are waited for in the order in which they started."""
    for wait_op in ops.WAITS:
        last = -1
        for wait in case.calls(wait_op):
            started = case.place[ops.started_by(wait)]
            if started < last:
                yield Offence(wait, "is waited for after a collective that started later")
            last = max(last, started)


def own_shard(case: Case) -> Iterator[Offence]:
    """A collective moves the shard of the parameter that it concerns."""
    for op, place in _SHARD_ARGUMENT.items():
        for node in case.calls(op):
            shard = node.args[place]
            if isinstance(shard, fx.Node) and (other := _other_shard(shard, facts(node).param)):
                yield Offence(node, f"works on the shard of {other}")
    for node in case.calls(ops.FREE, ops.KEEP, ops.KEEP_SHARD):
        full = node.all_input_nodes[0]
        if full in case.gathered and facts(full).param != facts(node).param:
            yield Offence(node, f"is given the value of {facts(full).param}", full)
    for start in case.calls(*ops.STARTS):
        if len(ops.members(start)) != len(facts(start).members):
            yield Offence(start, f"names {len(facts(start).members)} members")
        for shard, param in _members(start):
            if other := _other_shard(shard, param):
                yield Offence(start, f"works on the shard of {other}, not of {param}")


def own_layout(case: Case) -> Iterator[Offence]:
    """A parameter moves as its layout says, and a gathered value has its size."""
    for op, place in ops.LAYOUT_ARGUMENT.items():
        for node in case.calls(op):
            for name in moved(node):
                spec = case.program.params.get(name)
                if spec is not None and node.args[place] != spec.layout.handle:
                    yield Offence(node, f"moves {name}, whose layout is another one")
    for full in case.calls(ops.UNSHARD_WAIT):
        spec, size = case.program.spec(full), full.args[2]
        if spec is not None and size != list(spec.shape):
            yield Offence(full, f"is {size}, not {list(spec.shape)}")


def own_dtype(case: Case) -> Iterator[Offence]:
    """Full values and returned gradients have the dtypes that mixed precision states for them."""
    for node in case.calls(ops.UNSHARD, ops.UNSHARD_WAIT, ops.REDUCE_WAIT):
        spec, value = case.program.spec(node), node.meta.get("val")
        stated = spec.cast if spec is not None else None
        if spec is not None and ops.is_call(node, ops.REDUCE_WAIT):
            at_rest = spec.layout.grad_dtype if only_returned(node) else None
            stated = at_rest or spec.dtype
        if stated is not None and isinstance(value, Tensor) and value.dtype is not stated:
            yield Offence(node, f"is {value.dtype}, not {stated}")


def one_gather(case: Case) -> Iterator[Offence]:
    """ZeRO §7.2.2 counts one gather of each parameter per walk over the model."""
    if not (case.final or "merge_unshards" in case.done):
        return
    first: dict[str, fx.Node] = {}
    for node in case.calls(ops.UNSHARD, ops.UNSHARD_START):
        for param in moved(node):
            if param in first:
                yield Offence(node, f"gathers what {case.name(first[param])} gathers already")
            first.setdefault(param, node)


def freed_once(case: Case) -> Iterator[Offence]:
    """ZeRO §5.3: parameters are discarded after use; a gathered value is freed exactly once."""
    if not (case.final or "insert_frees" in case.done):
        return
    for full in case.gathered:
        if ops.is_call(full, ops.UNSHARD_WAIT) and len(case.frees.get(full, ())) != 1:
            yield Offence(full, f"is freed {len(case.frees.get(full, ()))} times, not once")


def free_follows_readers(case: Case) -> Iterator[Offence]:
    """A gathered value is freed after its last reader, through views too."""
    freed_at = {full: case.place[nodes[0]] for full, nodes in case.frees.items()}
    readers = {node for value in case.roots for node in value.users} if freed_at else set[fx.Node]()
    for node in sorted(readers, key=case.place.__getitem__):
        if ops.is_call(node, ops.FREE, ops.KEEP):
            continue
        for full in case.roots_read_by(node):
            if case.read_until(node) > freed_at.get(full, len(case.place)):
                yield Offence(node, f"reads {case.name(full)} after it was freed", full)


def only_gathered_freed(case: Case) -> Iterator[Offence]:
    """Resident and replicated values are never freed: they are the parameters."""
    for full, frees in case.frees.items():
        if full not in case.gathered:
            yield Offence(frees[0], f"frees {case.name(full)}, which is no gathered value", full)


def no_marker_left(case: Case) -> Iterator[Offence]:
    """Markers say nothing about when bytes move; a program that runs has none."""
    if case.final and case.program.region is not Region.JOINT:
        for node in case.calls(ops.UNSHARD, ops.REDUCE_GRAD):
            yield Offence(node, "is a marker that no pass replaced")


def buffers_follow(case: Case) -> Iterator[Offence]:
    """Buffers have rank 0's values before a forward reads them, as DDP's `broadcast_buffers`."""
    if not case.final or case.program.region not in (Region.FORWARD, Region.INFERENCE):
        return
    synced = {
        node: case.place[call]
        for call in reversed(case.calls(ops.SYNC_BUFFERS))
        for node in call.all_input_nodes
    }
    for node in case.program.with_role(Role.BUFFER):
        if node not in synced:
            yield Offence(node, "is a buffer that each rank may hold another value of")
        for user in node.users:
            if case.place[user] < synced.get(node, 0):
                yield Offence(user, f"reads buffer {case.name(node)} before ranks have one value")


def within_budget(case: Case) -> Iterator[Offence]:
    """Bytes in flight stay under the budget."""
    if case.budget_bytes is not None:
        peak, node = case.peak()
        if node is not None and peak > case.budget_bytes:
            yield Offence(node, f"raises the bytes in flight to {peak}, over {case.budget_bytes}")


_ENABLE = "enable the mandatory passes again (option disable), or fix the pass"

RULES: tuple[Rule, ...] = (
    Rule("read_in_order", read_in_order, "move the node behind what it reads"),
    Rule("one_wait", one_wait, "insert one wait per start, and let all readers read the wait"),
    Rule("waits_in_order", waits_in_order, "wait in the order of the starts"),
    Rule("own_shard", own_shard, "pass the shard of the same parameter"),
    Rule("own_layout", own_layout, "pass the layout of the same parameter"),
    Rule("own_dtype", own_dtype, "pass the dtype on when a collective is rebuilt"),
    Rule("codes_as_stated", codes_as_stated, "call note_sent after the codec is named"),
    Rule("one_gather", one_gather, _ENABLE),
    Rule("freed_once", freed_once, _ENABLE),
    Rule("free_follows_readers", free_follows_readers, "move the free after the last reader"),
    Rule("only_gathered_freed", only_gathered_freed, "free only what unshard_wait returned"),
    Rule("known_operations", known_operations, "register it with torch.library.custom_op"),
    Rule("read_before_written", read_before_written, "move the node before the write"),
    Rule("nothing_written", nothing_written, "write to a copy; only optimizers change parameters"),
    Rule("inside_the_node", inside_the_node, "run add_secondary_shards on forward and backward"),
    Rule("nothing_full_saved", nothing_full_saved, "recompute it in backward from the shard"),
    Rule("nothing_full_returned", nothing_full_returned, _ENABLE),
    Rule("one_reduction", one_reduction, _ENABLE),
    Rule("reduced_before", reduced_before, "reduce each gradient once"),
    Rule("every_gradient_reduced", every_gradient_reduced, "read the parameter through its module"),
    Rule("own_gradient", own_gradient, "return each reduced gradient in the place where it was"),
    Rule("no_marker_left", no_marker_left, _ENABLE),
    Rule("buffers_follow", buffers_follow, _ENABLE),
    Rule("same_border", same_border, "leave inputs alone; change what is saved before the cut"),
    Rule("same_values", same_values, "set replaces = True if the pass is to compute otherwise"),
    Rule("within_budget", within_budget, "start gathers later, or raise option prefetch_bytes"),
)
"""Every rule, in the order in which they are checked."""


def _members(start: fx.Node) -> Iterator[tuple[fx.Node, str]]:
    """Shard and name of every member; without a name if the facts do not hold one."""
    shards, names = ops.members(start), facts(start).members
    return zip(shards, itertools.chain(names, itertools.repeat("")), strict=False)


def _other_shard(shard: fx.Node, param: str) -> str:
    """The parameter whose shard it is, if that is known and not `param`."""
    source = facts(identity_source(shard))
    return source.param if source.role is Role.SHARD and source.param != param else ""
