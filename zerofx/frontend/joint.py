"""From a plain model to forward and backward, on fake tensors: no ranks, no memory."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from traceback import FrameSummary
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx, nn

from zerofx.errors import UnsupportedError
from zerofx.frontend.breaks import read_break
from zerofx.torch_private import (
    FakeMode,
    concrete_copy,
    fake_mode,
    graph_breaks,
    graph_module,
    logging_left_out,
    trace_apart,
    where_dynamo_stopped,
)

T = TypeVar("T")

DynamoGraph = tuple[fx.GraphModule, list[Any]]
"""A graph, and its inputs."""


@dataclasses.dataclass
class Call:
    """What Dynamo made of a call.

    Attributes:
        graphs: each with its inputs.
        runs: how often each ran.
        breaks: Dynamo's words and the user's frames wherever a graph ended early.
        error: what ended the call: between graphs Python runs, and it may want values.
    """

    graphs: list[DynamoGraph] = dataclasses.field(default_factory=list[DynamoGraph])
    runs: list[int] = dataclasses.field(default_factory=list[int])
    breaks: list[tuple[str, Sequence[FrameSummary]]] = dataclasses.field(default_factory=list)
    error: Exception | None = None

    @property
    def stopped(self) -> str:
        """Why it ended before its end; empty if it did not."""
        return "" if self.error is None else _reason(self.error)


class _Traced(Exception):
    """Carries what was traced out of AOTAutograd before anything is compiled."""

    def __init__(self, result: Any) -> None:
        super().__init__("traced")
        self.result = result


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph to be edited; facts, fake values and attributes are shared."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(module.graph, values)
    graph.output(result).meta = dict(module.graph.output_node().meta)
    made = graph_module(module, graph)
    made.meta = dict(module.meta)  # the policy of a selective checkpoint, for one
    return made


def dynamo_graph(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> DynamoGraph:
    """Dynamo's one graph of a call, and its inputs; what the call logs is left out.

    Raises:
        UnsupportedError: Dynamo needs several graphs; it says where and why.
    """
    with logging_left_out():
        call = _call(model, args, kwargs, fullgraph=True)
    if call.error is not None:
        raise _refusal(model, call.error) from call.error
    if not call.graphs:
        raise UnsupportedError(
            f"the forward of {type(model).__name__} computes nothing", "give it parameters to use"
        )
    return call.graphs[0]


def dynamo_graphs(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], mode: FakeMode
) -> Call:
    """All of Dynamo's graphs of a call on fake tensors.

    Args:
        model: with fake parameters.
        args: fake inputs.
        kwargs: likewise, by name.
        mode: that made them.
    """
    with mode, warnings.catch_warnings():
        # Dynamo looks at .grad of what one graph hands to the next.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        return _call(model, args, kwargs, fullgraph=False)


def _call(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, fullgraph: bool
) -> Call:
    call = Call()

    def record(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        place = len(call.graphs)
        call.graphs.append((module, inputs))
        call.runs.append(0)

        def run(*values: Any) -> Any:
            call.runs[place] += 1
            return module.forward(*values)

        return run

    torch.compiler.reset()
    try:
        compiled = torch.compile(model, backend=record, fullgraph=fullgraph, dynamic=False)
        compiled(*args, **kwargs)
    except Exception as error:
        call.error = error
    finally:
        call.breaks = graph_breaks()
        torch.compiler.reset()
    return call


def trace_only(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    joint: Callable[..., T],
    inference: Callable[[fx.GraphModule], T],
    *,
    inductor: bool,
) -> T:
    """Trace a Dynamo graph on fake copies of its inputs.

    Args:
        module: the graph.
        inputs: its inputs, of which only shapes count.
        joint: is given the joint graph, as partition functions of AOTAutograd are.
        inference: is given the graph if it has no backward.
        inductor: whether it will be compiled by Inductor.

    Returns:
        What the function that was called did.
    """
    mode = fake_mode()
    fakes = concrete_copy(list(inputs), mode)
    for fake, value in zip(fakes, inputs, strict=True):
        if isinstance(value, Tensor):
            fake.requires_grad_(value.requires_grad)

    def trained(*args: Any, **kwargs: Any) -> NoReturn:
        raise _Traced(joint(*args, **kwargs))

    def evaluated(traced: fx.GraphModule, _: Any) -> NoReturn:
        raise _Traced(inference(traced))

    try:
        trace_apart(module, fakes, mode, inductor=inductor, partition=trained, inference=evaluated)
    except _Traced as traced:
        return traced.result
    raise AssertionError("AOTAutograd traced nothing")


def _refusal(model: nn.Module, error: Exception) -> UnsupportedError:
    name, (words, frames) = type(model).__name__, where_dynamo_stopped(error)
    if not frames:
        return UnsupportedError(f"{name} does not run as one graph: {_reason(error)}", _ONE_GRAPH)
    found = read_break(words, frames)
    hints = "; ".join(hint.rstrip(".") for hint in found.remedies)
    return UnsupportedError(
        f"{name} does not run as one graph: {found.reason}",
        f"{hints}. {_ONE_GRAPH}" if hints else _ONE_GRAPH,
        [f"{found.file}:{found.line} in {found.function}: {found.code}"],
    )


_ONE_GRAPH = (
    "A plan needs a forward that torch.compile(model, fullgraph=True) takes, and inputs that fit "
    "it (--input, if they are not token ids; --length, if they are too long)."
)


def _reason(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return "\n  ".join(lines[:12]) or type(error).__name__
