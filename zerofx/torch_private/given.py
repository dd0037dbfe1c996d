"""What `torch.compile` was given, and when what it returned is called."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.backends import registry
from torch._dynamo.callback import (
    CallbackArgs,
    CallbackTrigger,
    callback_handler,
    on_compile_end,
    on_compile_start,
)
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

Hear = Callable[[Any, Mapping[str, Any], nn.Module | None], bool]
"""Hears a backend, its `options` and `mode`, and the module that was compiled (`None`: to be found
on the stack); says whether it needs to hear of this module no more."""


def before_forwards(
    hear: Hear, begins: Callable[[nn.Module], bool], compiled: Callable[[], None]
) -> None:
    """Call `hear` before the forward of a compiled module, and before Dynamo compiles a frame.

    The former is not for `module.compile()`, the latter not for forwards that Dynamo leaves alone.

    Args:
        hear: until it needs to hear of a module no more.
        begins: then, before each of its forwards, until it says that it is not about this module.
        compiled: when Dynamo has compiled a frame, or could not.
    """
    regions: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def registered(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
        listen()
        if not isinstance(outer, OptimizedModule) or inner is None:
            return

        heard = False

        def before(compiled: nn.Module, args: Any) -> None:
            nonlocal heard
            listen()
            heard = heard or hear(*_given(compiled.dynamo_ctx), inner)
            if heard and not begins(inner):
                handle.remove()
            else:
                _count_apart(compiled.dynamo_ctx, inner, regions)

        handle = outer.register_forward_pre_hook(before)

    def compiles(args: CallbackArgs) -> None:
        if args.callback_trigger is not CallbackTrigger.DYNAMO:
            return  # a backward: torch holds a lock, and Dynamo would compile what is called here
        for frame, _ in traceback.walk_stack(sys._getframe(1)):
            if frame.f_code.co_name == "compile_wrapper":
                hear(*_given(frame.f_locals["self"]), None)
                return

    def ended(args: CallbackArgs) -> None:
        if args.callback_trigger is CallbackTrigger.DYNAMO:
            compiled()

    def listen() -> None:
        """Whenever there is an occasion: `torch.compiler.reset()` forgets it."""
        if compiles not in callback_handler.start_callbacks:
            on_compile_start(compiles)
            on_compile_end(ended)

    register_module_module_registration_hook(registered)
    listen()


def _count_apart(context: Any, model: nn.Module, regions: WeakIdKeyDictionary) -> None:
    """Let a model have a recompile limit of its own, as `isolate_recompiles=True` gives to a call.

    Programs are their model's alone, so models of one class would use up one limit. They do in
    torch 2.11, which does not have that option.
    """
    if getattr(context, "_isolate_recompiles_id", None) == _SHARED:
        if model not in regions:
            regions[model] = next(eval_frame._next_isolate_recompiles_id)
        context._isolate_recompiles_id = regions[model]


_SHARED = -1


def mix_while_tracing() -> None:
    """Let plain tensors meet `DTensor`s until `stop_mixing`, or until Dynamo's compilation ends.

    As `torch.distributed.tensor.experimental.implicit_replication` does, which is a context.
    """
    if _ended not in callback_handler.end_callbacks:
        on_compile_end(_ended)
    DTensor._op_dispatcher._allow_implicit_replication = True


def is_mixing() -> bool:
    """Whether Dynamo traces a model, in which sharded parameters will be full values."""
    return DTensor._op_dispatcher._allow_implicit_replication


def stop_mixing() -> None:
    """Dynamo has traced a graph."""
    DTensor._op_dispatcher._allow_implicit_replication = False


def _ended(args: CallbackArgs) -> None:
    if args.callback_trigger is CallbackTrigger.DYNAMO:
        stop_mixing()


def _given(context: Any) -> tuple[Any, Mapping[str, Any]]:
    """The backend that `torch.compile` was given, and what for it."""
    given: Any = innermost_backend(context.callback)
    return getattr(given, "compiler_fn", given), getattr(given, "kwargs", {})


def looked_up(names: Iterable[str]) -> bool:
    """Whether one of these backends was given to `torch.compile` by its name."""
    return any(name in registry._COMPILER_FNS for name in names)
