"""The type equation at the cut: forward and backward re-add to the joint program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, fx

from zerofx.errors import VerificationError
from zerofx.ir.border import look
from zerofx.ir.case import Case, gradients_by_input
from zerofx.ir.facts import Role, facts
from zerofx.ir.meaning import Meanings
from zerofx.ir.program import Program
from zerofx.ir.value_rules import called, difference
from zerofx.ir.view import keeps_random_state


def verify_cut(joint: Program, forward: Program, backward: Program, meant: Meanings) -> None:
    """Check a partition right after it was made, before passes rename what is saved.

    Inputs of the joint program are inputs of forward or, for tangents, of backward; backward reads
    what forward saves and nothing else; user outputs and gradients match in number and place, and
    are made by the same operations from the same values.

    Args:
        joint: what was cut.
        forward: its first part.
        backward: its second part.
        meant: what the joint program meant before it was cut.

    Raises:
        VerificationError: names every input, saved value or gradient that does not add up.
    """
    problems = [
        *_inputs(joint, forward, backward),
        *_saved(joint, forward, backward),
        *_results(joint, forward, backward),
    ]
    if not problems:
        problems = list(_values(joint, forward, backward, meant))
    if problems:
        raise VerificationError(
            "cut",
            "forward and backward do not add up to the joint program",
            "report this: the partition function broke its contract",
            problems,
        )


def _inputs(joint: Program, forward: Program, backward: Program) -> Iterator[str]:
    joint_inputs, forward_inputs = _placeholders(joint), _placeholders(forward)
    backward_inputs = _placeholders(backward)
    for name, node in joint_inputs.items():
        if name not in forward_inputs and name not in backward_inputs:
            yield f"input {_called(node)} is read by neither program"
    for name, node in forward_inputs.items():
        # The partitioner adds random generator states, which are no tensors.
        if name not in joint_inputs and isinstance(node.meta.get("val"), Tensor):
            yield f"forward reads {_called(node)}, which is no input of the joint program"


def _saved(joint: Program, forward: Program, backward: Program) -> Iterator[str]:
    saved = [n for n in forward.outputs[forward.num_user_outputs :] if isinstance(n, fx.Node)]
    names = {node.name for node in saved}
    given = set(_placeholders(joint)) - set(_placeholders(forward))
    reads = {
        name: node
        for name, node in _placeholders(backward).items()
        if isinstance(node.meta.get("val"), Tensor)
    }
    foreign = [node for name, node in reads.items() if name not in names and name not in given]
    unread = [
        node
        for node in saved
        if isinstance(node.meta.get("val"), Tensor) and node.name not in reads
    ]
    # The partitioner renames the random states of a checkpointed region, and nothing else.
    if [look(node) for node in foreign] == [look(node) for node in unread]:
        return
    for node in foreign:
        yield f"backward reads {_called(node)}, which forward does not save"
    for node in unread:
        yield f"forward saves {_called(node)}, which backward does not read"


def _results(joint: Program, forward: Program, backward: Program) -> Iterator[str]:
    if forward.num_user_outputs != joint.num_user_outputs:
        yield (
            f"forward returns {forward.num_user_outputs} values to the user, "
            f"the joint program {joint.num_user_outputs}"
        )
    wanted = joint.outputs[joint.num_user_outputs :]
    if len(wanted) != len(backward.outputs):
        yield f"backward returns {len(backward.outputs)} gradients of {len(wanted)}"
        return
    owners, reduced = gradient_owners(joint), Case(backward).reduced_as
    for place, (old, new) in enumerate(zip(wanted, backward.outputs, strict=True)):
        if (old is None) != (new is None):
            yield f"gradient {place} ({owners[place] or 'of an input'}) is missing in one program"
        elif owners[place] and reduced.get(new) != owners[place]:
            yield f"gradient {place} is not the reduced gradient of {owners[place]}"


def _values(joint: Program, forward: Program, backward: Program, meant: Meanings) -> Iterator[str]:
    """Results that are others if backward reads what forward saved."""
    if any(keeps_random_state(node) for part in (forward, backward) for node in part.graph.nodes):
        return  # other operations, which torch put in the place of random ones
    first = meant.of_part(forward, {})
    saved = (node for node in forward.outputs if isinstance(node, fx.Node))
    second = meant.of_part(backward, {node.name: first.value(node) for node in saved})
    results = *first.last.outputs[: forward.num_user_outputs], *second.last.outputs
    for place, (was, now) in enumerate(zip(meant.last.outputs, results, strict=True)):
        if was != now:
            yield f"{called(joint, place)} is {difference(was, now)}"


def gradient_owners(joint: Program) -> tuple[str, ...]:
    """For each gradient of a joint program the parameter that it is of; "" if there is none."""
    gradients = joint.outputs[joint.num_user_outputs :]
    owners = [""] * len(gradients)
    for node, place in gradients_by_input(joint):
        if facts(node).role is Role.SHARD and gradients[place] is not None:
            owners[place] = facts(node).param
    return tuple(owners)


def _placeholders(program: Program) -> dict[str, fx.Node]:
    nodes: Iterable[fx.Node] = program.graph.find_nodes(op="placeholder")
    return {node.name: node for node in nodes}


def _called(node: fx.Node) -> str:
    param = facts(node).param
    return f"{node.name} ({param})" if param else node.name
