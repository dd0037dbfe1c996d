"""A rule about memory that others read: parameters, and what is gathered of them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from zerofx.ir import ops
from zerofx.ir.case import Case, Offence
from zerofx.ir.facts import Role, facts
from zerofx.ir.view import aliased_inputs

_FULL = (ops.UNSHARD, ops.UNSHARD_WAIT)


def nothing_written(case: Case) -> Iterator[Offence]:
    """No operation of a program writes to a shard or to a full value, through views neither.

    A shard is the parameter, which the optimizer alone changes; a full value may be kept for
    backward, or be the parameter itself.
    """
    for node in case.place:
        for written in _written(node):
            for source in _sources(written):
                is_shard = source.op == "placeholder" and facts(source).role is Role.SHARD
                if is_shard or ops.is_call(source, *_FULL):
                    yield Offence(node, f"writes to {case.name(source)}", source)


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """Inputs that an operation changes, by its schema; zerofx's own know what they do."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or schema.name.startswith("zerofx::"):
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        found: list[fx.Node] = []
        fx.map_arg(given, found.append)
        yield from found


def _sources(node: fx.Node) -> Iterator[fx.Node]:
    """`node`, and what it views."""
    yield node
    for source in aliased_inputs(node):
        yield from _sources(source)
