"""The backward pass that runs now."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree
from torch.utils.checkpoint import CheckpointFunction


def backward_id() -> int:
    """A number for the backward pass under way on this thread; -1 outside one."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Run `function` when the backward pass under way ends."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def adds_to_grad(param: Tensor) -> bool:
    """Whether the backward pass under way does, as `autograd.grad` and `inputs=` do not."""
    if not param.requires_grad:
        return False
    # Ops run without autograd, which is asked for the parameter's node here.
    every_key = torch._C.DispatchKeySet.from_raw_repr(0)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), every_key):
        node = torch.autograd.graph.get_gradient_edge(param).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it is not said of parameters that `autograd.grad` was asked for
        return False


def _metadata(leaf: Tensor) -> dict[Any, Any]:
    node: Any = torch.autograd.graph.get_gradient_edge(leaf).node
    return node.metadata


class _Note:
    """Lives as long as a node of autograd, in whose metadata it lies."""


def is_in_a_graph(leaf: Tensor, ended: Callable[[], None]) -> bool:
    """Whether what was computed from `leaf` is alive with its graph; if so, `ended` is called then.

    Only graphs keep the node of a leaf: where there is none, the next one knows nothing of this.
    """
    note = _Note()
    _metadata(leaf)["zerofx"] = note
    alive = "zerofx" in _metadata(leaf)
    if alive:
        weakref.finalize(note, ended).atexit = False
    return alive


def set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`, whatever its class says of that."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = value


def inside_graph() -> bool:
    """Whether torch computes gradients now, of what is no leaf; in hooks of leaves it does not."""
    node: Any = torch._C._current_autograd_node()
    return node is not None and node.name() != "torch::autograd::AccumulateGrad"


def inside_reentrant_checkpoint() -> bool:
    """Whether the backward pass under way was started by a checkpointed region of another."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.backward.__code__:
        frame = frame.f_back
    return frame is not None


def kept_by_running_function() -> list[Tensor]:
    """What the `torch.autograd.Function` whose backward runs now kept, by whichever way."""
    node: Any = torch._C._current_autograd_node()
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return []
    # Not unpacked: hooks, of checkpointing for one, allow that once.
    saved = [each.data for each in node._raw_saved_tensors]
    kept = [*saved, *_pytree.tree_leaves(list(vars(node).values()))]
    return [each for each in kept if isinstance(each, Tensor)]
