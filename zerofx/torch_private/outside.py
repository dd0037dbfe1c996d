"""Where Dynamo puts what it traces inside functions that operators such as `torch.cond` run."""

from __future__ import annotations

from typing import Any

from torch._dynamo import assume_constant_result
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._ops import HigherOrderOperator

_OPERATORS = (
    *("cond", "switch", "while_loop", "while_loop_stack_output"),
    *("map_impl", "scan", "associative_scan", "flex_attention"),
)


@assume_constant_result
def trace_outside() -> bool:
    """From here on, what a function given to `torch.cond` and its like does is done before it.

    Dynamo calls this while it traces. `trace_inside` follows if the answer is yes.

    Returns:
        Whether Dynamo was in such a function.
    """
    try:
        tracers: list[Any] = InstructionTranslator.current_tx().output.tracers
    except AttributeError:  # not Dynamo: torch.export traces by itself
        return False
    place = each = inside = tracers[-1]
    while each is not None:  # checkpointed regions may lie inside such functions
        if _runs_a_function(each.source_target):
            place = each.parent
        each = each.parent
    if place is not inside:
        tracers.append(place)
    return place is not inside


@assume_constant_result
def trace_inside() -> None:
    """Goes back into the function that `trace_outside` left."""
    InstructionTranslator.current_tx().output.tracers.pop()


def _runs_a_function(target: object) -> bool:
    return isinstance(target, HigherOrderOperator) and target.name() in _OPERATORS
