"""Which modules run, and what was compiled: read off this thread's call stack."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType

from torch import nn

from zerofx.torch_private import unwrap_compiled

_CALLS = ("_call_impl", "_wrapped_call_impl")
_CALL_FILE = nn.Module._call_impl.__code__.co_filename


def running_modules() -> Iterator[tuple[FrameType, nn.Module]]:
    """Calls of modules on this thread's stack, innermost first."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_name in _CALLS and code.co_filename == _CALL_FILE:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield frame, unwrap_compiled(module)


def compiled_module(frames: Sequence[tuple[FrameType, nn.Module]]) -> nn.Module | None:
    """The module that `torch.compile` was given, of those that run; `None`: a function."""
    inside: nn.Module | None = None
    by_frame = {id(frame): module for frame, module in frames}
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if id(frame) in by_frame:
            inside = by_frame[id(frame)]
        if frame.f_code.co_name == "compile_wrapper":
            if inside is not None:
                return inside
            return by_frame.get(id(frame.f_back))
    return inside


def compiled_methods() -> Iterator[tuple[FrameType, nn.Module, str]]:
    """Calls of compiled methods, with their names, innermost first: no module is called for them.

    What `torch.compile` makes of what it has returned is the method `forward`. The name is empty
    where all of the module's call is compiled, as `run.forward` of a container's `run` does.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name != "compile_wrapper":
            continue
        called = inspect.unwrap(frame.f_locals["fn"], stop=lambda each: hasattr(each, "__self__"))
        name = getattr(called, "__name__", "")
        module = getattr(called, "__self__", called)
        if isinstance(module, nn.Module) and name not in _CALLS:
            yield frame, module, name
