"""Forward and backward re-add to the joint program, or the difference is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.passes.models import mlp
from tests.program_builder import cut, layout_of, trace_joint
from zerofx.errors import VerificationError
from zerofx.ir.cut import verify_cut
from zerofx.ir.meaning import Meanings
from zerofx.ir.ops import REDUCE_GRAD
from zerofx.ir.program import Program


def test_right_cut() -> None:
    joint = trace_joint(mlp(layout_of(2)))
    verify_cut(joint, *cut(joint), Meanings(joint))


def test_cut_with_frozen_parameters() -> None:
    joint = trace_joint(mlp(layout_of(2), frozen=("a.weight", "scale")))
    verify_cut(joint, *cut(joint), Meanings(joint))


def test_renamed_random_states_pass() -> None:
    joint = trace_joint(mlp(layout_of(2)))
    forward, backward = cut(joint)
    renamed = backward.graph.find_nodes(op="placeholder")[-2]
    with backward.graph.inserting_before(renamed):
        state = backward.graph.placeholder("rng_state_output_0")
    state.meta = renamed.meta
    renamed.replace_all_uses_with(state)
    backward.graph.erase_node(renamed)
    verify_cut(joint, forward, backward, Meanings(joint))


def _drop_saved(forward: Program, backward: Program) -> None:
    _set_outputs(forward, forward.outputs[:-1])


def _save_more(forward: Program, backward: Program) -> None:
    extra = next(n for n in forward.graph.nodes if n.op == "call_function")
    _set_outputs(forward, [*forward.outputs, extra])


def _drop_user_output(forward: Program, backward: Program) -> None:
    forward.num_user_outputs -= 1


def _drop_gradient(forward: Program, backward: Program) -> None:
    _set_outputs(backward, [None, *backward.outputs[1:]])


def _lose_gradient(forward: Program, backward: Program) -> None:
    _set_outputs(backward, backward.outputs[1:])


def _unreduced(forward: Program, backward: Program) -> None:
    (marker,) = [n for n in backward.calls(REDUCE_GRAD) if n.meta["zerofx"].param == "b.weight"]
    marker.replace_all_uses_with(marker.args[0])  # type: ignore[arg-type]


def _exchange_saved(forward: Program, backward: Program) -> None:
    one, two = backward.graph.find_nodes(op="placeholder")[-3:-1]
    (reader,) = two.users
    reader.replace_input_with(two, one)


def _foreign_input(forward: Program, backward: Program) -> None:
    first = next(iter(forward.graph.nodes))
    with forward.graph.inserting_before(first):
        node = forward.graph.placeholder("stranger")
        node.meta["val"] = torch.empty(2, device="meta")


FAULTS: list[tuple[Callable[[Program, Program], None], str]] = [
    (_drop_saved, "which forward does not save"),
    (_save_more, "which backward does not read"),
    (_drop_user_output, "forward returns 2 values to the user, the joint program 3"),
    (_drop_gradient, "gradient 0 (a.weight) is missing in one program"),
    (_lose_gradient, "backward returns 6 gradients of 7"),
    (_unreduced, "is not the reduced gradient of b.weight"),
    (_exchange_saved, "gradient 0 is mm("),
    (_foreign_input, "forward reads stranger, which is no input of the joint program"),
]


@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_wrong_cut(fault: Callable[[Program, Program], None], message: str) -> None:
    joint = trace_joint(mlp(layout_of(2)))
    forward, backward = cut(joint)
    fault(forward, backward)
    with pytest.raises(VerificationError) as caught:
        verify_cut(joint, forward, backward, Meanings(joint))
    assert caught.value.rule == "cut"
    assert message in str(caught.value)


def _set_outputs(program: Program, values: list[fx.Node | None]) -> None:
    program.output.args = (tuple(values),)
