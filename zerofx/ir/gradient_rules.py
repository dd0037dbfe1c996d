"""Rules about gradients: each is the mean over ranks, made once, and returned as what it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import fx

from zerofx.ir import ops
from zerofx.ir.case import Case, Offence, gradients_by_input
from zerofx.ir.facts import Role, facts
from zerofx.ir.spec import Region


def one_reduction(case: Case) -> Iterator[Offence]:
    """ZeRO §5.2: each parameter has one gradient reduction per step; tied weights sum first."""
    joint = case.program.region is Region.JOINT
    if joint and not (case.final or "merge_reduces" in case.done):
        return
    first: dict[str, fx.Node] = {}
    for node in case.calls(ops.REDUCE_GRAD, ops.REDUCE_START):
        for param in moved(node):
            if param in first:
                yield Offence(
                    node, f"reduces a gradient that {case.name(first[param])} reduces too"
                )
            first.setdefault(param, node)


def reduced_before(case: Case) -> Iterator[Offence]:
    """A gradient that was reduced is not reduced again on its way out."""
    for node in case.calls(ops.REDUCE_GRAD, ops.REDUCE_START):
        for grad in ops.gradients(node):
            for earlier in case.reductions.get(grad, ()):
                yield Offence(node, f"reduces what {case.name(earlier)} already reduced", earlier)


def every_gradient_reduced(case: Case) -> Iterator[Offence]:
    """Every gradient of a trainable parameter passes a reduction of that parameter."""
    if case.program.region is not Region.JOINT:
        return
    gradients = case.program.outputs[case.program.num_user_outputs :]
    for shard, place in gradients_by_input(case.program):
        param, gradient = facts(shard).param, gradients[place]
        if facts(shard).role is not Role.SHARD or not isinstance(gradient, fx.Node):
            continue
        found = {name for node in case.reductions.get(gradient, ()) for name in moved(node)}
        if param not in found:
            yield Offence(gradient, f"is the gradient of {param}, and no rank reduced it", shard)


def own_gradient(case: Case) -> Iterator[Offence]:
    """A backward program returns, in every place, the reduced gradient that the cut put there."""
    owners = case.program.gradients_of
    for value, param in itertools.zip_longest(case.program.outputs[: len(owners)], owners):
        if not param or (isinstance(value, fx.Node) and case.reduced_as.get(value) == param):
            continue
        node = value if isinstance(value, fx.Node) else case.program.output
        yield Offence(node, f"is returned as the gradient of {param}, and is not what was reduced")


def moved(node: fx.Node) -> tuple[str, ...]:
    """Names of the parameters that a marker or a collective moves."""
    record = facts(node)
    return record.members or ((record.param,) if record.param else ())
