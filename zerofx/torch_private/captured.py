"""What Dynamo made of the functions that it compiled."""

from __future__ import annotations

import dataclasses

import torch
from torch import fx, nn
from torch._dynamo.exc import RestartAnalysis
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource
from torch._dynamo.utils import get_compilation_metrics
from torch._guards import CompileContext

DynamoStartsAgain = RestartAnalysis
"""Leaves a backend when Dynamo will give it another graph of the same function instead."""


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One attempt of Dynamo to compile a frame.

    Attributes:
        function: name of the frame.
        filename: where it is defined.
        line: its first one there.
        recompile_reason: the guard that failed, if another version existed.
        failure: why Dynamo gave the frame up; empty if it did not.
        failed_at: file and line of that.
        seconds: that it took, backends included.
    """

    function: str
    filename: str
    line: int
    recompile_reason: str
    failure: str
    failed_at: tuple[str, int]
    seconds: float


def compilations(since: float) -> list[Compilation]:
    """Those that began since a `time.time()`, oldest first; Dynamo remembers the last 64."""
    return [
        Compilation(
            each.co_name or "",
            each.co_filename or "",
            each.co_firstlineno or 0,
            each.recompile_reason or "",
            each.fail_reason or "",
            (each.fail_user_frame_filename or "", each.fail_user_frame_lineno or 0),
            each.entire_frame_compile_time_s or 0.0,
        )
        for each in get_compilation_metrics()
        if (each.start_time_us or 0) >= 1e6 * since
    ]


def frame_being_compiled() -> int:
    """Which frame of this process Dynamo compiles now; -1: none."""
    found = CompileContext.current_compile_id()
    return -1 if found is None or found.frame_id is None else found.frame_id


def is_dtensor_call(node: fx.Node) -> bool:
    """Whether `node` of a Dynamo graph calls what only a `DTensor` has: `to_local` and its like."""
    return _method(node) in _DTENSOR_METHODS


def is_to_local(node: fx.Node) -> bool:
    """Whether `node` of a Dynamo graph takes the local tensor of a `DTensor`."""
    return _method(node) == "to_local"


def guard_shape(node: fx.Node) -> None:
    """Have Dynamo compile anew where an input of its graph has another shape.

    Its own guards of a `DTensor` compare the rows of this rank, and no global shape.

    Args:
        node: the input, of the graph that a backend is given.
    """
    shape = AttrSource(node.meta["grapharg"].source, "shape")
    install_guard(shape.make_guard(GuardBuilder.EQUALS_MATCH))


def _method(node: fx.Node) -> str:
    if node.op == "call_method":
        return str(node.target)
    # Up to torch 2.11 Dynamo hides arguments that are no tensors in a function that it makes.
    name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name.removeprefix("prim_")


_DTENSOR_METHODS = ("to_local", "full_tensor", "redistribute")


def loses_numbers() -> bool:
    """Whether compiled code never writes to inputs without dimensions in float64 on a CPU."""
    return torch.__version__ < "2.15"


def ends_where_data_is_assigned(module: nn.Module | None) -> bool:
    """Whether a frame's graph breaks off at `x.data = …` of an `x` that it computed."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is not None and "mutate tensor data attribute" in reason.reason
