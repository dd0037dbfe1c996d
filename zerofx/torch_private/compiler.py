"""Dynamo, AOTAutograd and Inductor."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from traceback import FrameSummary
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo import eval_frame
from torch._dynamo import config as dynamo_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import ShortenTraceback, TensorifyScalarRestartAnalysis
from torch._dynamo.output_graph import FakeRootModule
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import counters, detect_fake_mode, graph_break_reasons
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._inductor import config as inductor_config
from torch._inductor import list_mode_options
from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch._logging import trace_structured
from torch._logging._internal import trace_log
from torch._subclasses import FakeTensorMode
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen


class _RestartAfterSharding(TensorifyScalarRestartAnalysis):
    """Dynamo starts a frame's analysis again; its base class is what backends may raise."""


def restart_dynamo() -> NoReturn:
    """Let Dynamo trace the current frame again, without what it learned from the first time."""
    InstructionTranslator.current_tx().speculation_log.clear()
    raise _RestartAfterSharding("parameters were sharded")


def pass_through_dynamo(error: Exception) -> None:
    """Let `error` leave Dynamo as it is, for users to catch by its class.

    Dynamo wraps what a backend raises in `BackendCompilerFailed`, except exceptions of this base.
    """
    error.__class__ = _passing_class(type(error))
    vars(error).update(dict.fromkeys(_DYNAMO_ATTRIBUTES))


_DYNAMO_ATTRIBUTES = ("first_useful_frame", "frame_exec_strategy", "_torch_dynamo_tracer_output")


@functools.cache
def _passing_class(kind: type[Exception]) -> type[Exception]:
    if issubclass(kind, ShortenTraceback):
        return kind

    def reduce(self: Exception) -> tuple[Any, ...]:
        # The class made here cannot be found by name where the error is unpickled.
        state = {key: v for key, v in vars(self).items() if key not in _DYNAMO_ATTRIBUTES}
        return _restore_error, (kind, self.args, state)

    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce__": reduce}
    bases: tuple[Any, ...] = (kind, ShortenTraceback)
    return type(kind.__name__, bases, body)


def _restore_error(
    kind: type[Exception], args: tuple[Any, ...], state: dict[str, Any]
) -> Exception:
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(state)
    return error


def lookup_seed_op() -> Any:
    """Inductor's op that takes one random seed out of many."""
    return torch.ops.prims.inductor_lookup_seed.default


def is_checkpoint_call(node: fx.Node) -> bool:
    """Whether `node` of a Dynamo graph runs a checkpointed region: a subgraph and its operands."""
    return node.target is tag_activation_checkpoint


def trace_and_compile(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inductor: bool,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition: Callable[..., Any],
) -> Callable[..., Any]:
    """Trace forward and backward of a Dynamo graph and compile them through the callbacks."""
    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition,
        decompositions=_decompositions() if inductor else None,
        keep_inference_input_mutations=True,
    )(module, example_inputs)


def trace_apart(
    module: fx.GraphModule,
    fakes: Sequence[Any],
    mode: FakeTensorMode,
    *,
    inductor: bool,
    partition: Callable[..., Any],
    inference: Callable[..., Any],
) -> None:
    """Trace a Dynamo graph on fake inputs of `mode`, whatever is being compiled around it.

    `partition` gets the joint graph, or `inference` one without a backward; they leave by an
    exception of their own, nothing is compiled.
    """
    compiler = aot_autograd(
        fw_compiler=inference,
        partition_fn=partition,
        decompositions=_decompositions() if inductor else None,
    )
    with tracing(TracingContext(mode)), mode, _use_lazy_graph_module(True):
        compiler(module, fakes)


def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Inductor's, without those that make sums of products of one row or column only.

    Such sums are computed again in backward, products are not: ranks with batches of one sample
    would gather other parameters than the others.
    """
    aten, table = torch.ops.aten, select_decomp_table()
    products = (aten.mm, aten.bmm, aten.addmm)
    kept = {
        op: how for op, how in table.items() if getattr(op, "overloadpacket", op) not in products
    }
    return {**kept, aten.add.Tensor: _add}


def _add(one: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """torch 2.13 makes one operation of a product and its sum with others, and loses `alpha`."""
    return NotImplemented if alpha == 1 else one + other * alpha


def inductor_joint_passes(module: fx.GraphModule) -> None:
    """What Inductor does to a graph before it is cut; random ops get seeds here."""
    mode = detect_fake_mode([n.meta.get("val") for n in module.graph.nodes])
    with V.set_fake_mode(mode):
        _recursive_joint_graph_passes(module)


def compile_with_inductor(
    module: fx.GraphModule, values: list[Any], is_backward: bool, patches: dict[str, Any]
) -> Callable[[list[Any]], Any]:
    """Compile one segment; the result takes a list, which it empties."""
    mode = detect_fake_mode(values)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), inductor_config.patch(patches):
        return compile_fx_inner(module, values, is_backward=is_backward)


def compile_for_sizes(
    function: Callable[..., object], examples: Sequence[Tensor]
) -> Callable[[list[Any]], Any]:
    """Compile a function that writes some of its operands, once for operands of all sizes.

    Dynamo and AOTAutograd take no operands that are views of one tensor in several dtypes.

    Args:
        function: its last operations are `copy_` to operands.
        examples: like the operands, with sizes and strides that are equal only where they always
            are, and 1 only where they always are.

    Returns:
        Takes a list, which it empties.
    """

    def returning(*operands: Tensor) -> tuple[()]:
        function(*operands)
        return ()

    graph = make_fx(returning, select_decomp_table(), tracing_mode="symbolic")(*examples)
    values = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    return compile_with_inductor(graph, values, False, {})


def inductor_options_of_mode(mode: str | None) -> dict[str, Any]:
    """Inductor configuration behind `torch.compile(mode=…)`."""
    return dict(list_mode_options(mode))


def records_cuda_graphs(patches: Mapping[str, Any]) -> bool:
    """Whether Inductor does so with its configuration changed by `patches`."""
    return bool(patches.get("triton.cudagraphs", inductor_config.triton.cudagraphs))


def holds_a_graph(module: nn.Module) -> bool:
    """Whether `module` is what Dynamo and FX hang the tensors of a graph on."""
    return isinstance(module, (FakeRootModule, fx.GraphModule))


def is_tracing() -> bool:
    """Whether torch writes its structured trace (`TORCH_TRACE`)."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Put a text into the structured trace, beside the compilation under way."""
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


def why_graph_ended(module: fx.GraphModule) -> tuple[str, Sequence[FrameSummary]]:
    """Why Dynamo ended a graph before its function did, and the user's frames there, inmost last.

    Returns:
        Dynamo's words; empty if the graph ends where the function returns.
    """
    ended = getattr(module, "compile_subgraph_reason", None)
    if ended is None or not ended.graph_break:
        return "", ()
    return ended.reason, ended.user_stack


def graph_breaks() -> list[tuple[str, Sequence[FrameSummary]]]:
    """Dynamo's words and the user's frames, inmost last, of all breaks since it was reset.

    Those before the first operation of a function are among them, where there is no graph to ask.
    """
    return [(each.reason, each.user_stack) for each in graph_break_reasons]


def where_dynamo_stopped(error: Exception) -> tuple[str, Sequence[FrameSummary]]:
    """Dynamo's words in an error of `fullgraph=True`, and the user's frames without torch's.

    Returns:
        No frames if the error is none of Dynamo's.
    """
    frames = getattr(error, "real_stack", None) or ()
    own = [each for each in frames if not each.filename.startswith(_TORCH)]
    return str(getattr(error, "msg", error)), own or tuple(frames)


_TORCH = os.path.dirname(torch.__file__)


def run_boxed(owner: nn.Module, graph: fx.Graph) -> Callable[[list[Any]], Any]:
    """Run a graph op by op; takes a list, which it empties, and drops values after last use.

    Args:
        owner: holds the constants that it reads.
        graph: returns a tuple.
    """
    graph.set_codegen(_BoxedCodeGen())
    return fx.GraphModule(owner, graph).forward


def recompile_limit() -> int:
    """How many variants of a function Dynamo compiles; `torch.compile` may set it while it does."""
    return dynamo_config.recompile_limit


def past_recompile_limit(limit: int) -> str:
    """The innermost function on the stack that Dynamo gave up compiling anew; "" if there is none.

    Its code then runs as it is, although `limit` compiled variants of it exist.
    """
    if not any("recompile limit exceeded" in why for why in counters["unimplemented"]):
        return ""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if len(_variants(frame.f_code)) >= limit:
            return frame.f_code.co_qualname
    return ""


def _variants(code: CodeType) -> Sequence[Any]:
    """What Dynamo compiled of `code` for the model that runs; for any, where torch cannot tell."""
    if not hasattr(eval_frame, "_get_cache_entries_for_region"):
        return eval_frame._debug_get_cache_entry_list(code)
    region = eval_frame.get_eval_frame_isolate_recompiles_id()
    return eval_frame._get_cache_entries_for_region(code, region)
