"""Functions that Dynamo leaves to Python, calls that it leaves out, and who calls."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import config
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._subclasses import fake_tensor


def leave_to_python(*packages: str) -> None:
    """Let Dynamo compile no frame of functions of `packages`, nor of what these call.

    Where it skips a function of the user's, as it does a loop with a graph break, it tries those
    that are called from there; guards, too, may read a property. Ours gain nothing, and lose: it
    writes dictionaries back as they were when it compiled, and stops at what it does not know. It
    still inlines calls of them.

    Args:
        packages: names of packages; what is imported of them so far.
    """
    skip = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    for name, module in tuple(sys.modules.items()):
        if name.startswith(packages):
            for code in _codes(vars(module).values(), name):
                set_code_exec_strategy(code, skip)


@contextmanager
def logging_left_out() -> Iterator[None]:
    """Dynamo leaves out calls of loggers, each of which would end a graph.

    Nor does torch log an operation that cannot be, before its error says so.
    """
    name = "ignore_logging_functions"
    if not hasattr(config, name):
        name = "ignore_logger_methods"  # torch 2.11
    methods = {method for method in vars(logging.Logger).values() if callable(method)}
    fakes, disabled = fake_tensor.log, fake_tensor.log.disabled
    fakes.disabled = True
    try:
        with config.patch({name: getattr(config, name) | methods}):
            yield
    finally:
        fakes.disabled = disabled


_IS_META = torch.Tensor.is_meta.__get__  # pyright: ignore[reportAttributeAccessIssue]


def init_that_asks(func: Any) -> FrameType | None:
    """The function of `nn.init` that asks, in a mode of torch functions, whether a tensor is meta.

    Those that draw until values fit do so, and leave a tensor alone that is.

    Args:
        func: what the mode was called with; the mode calls this itself.
    """
    caller = sys._getframe(2)
    asks = func == _IS_META and caller.f_code.co_filename == nn.init.__file__
    return caller if asks else None


def _codes(values: Any, module: str) -> Iterator[CodeType]:
    """Of the functions that a module defines, with those inside of them and of its classes."""
    for value in values:
        if isinstance(value, property):
            yield from _codes((value.fget, value.fset), module)
        elif isinstance(value, type):
            if value.__module__ == module:
                yield from _codes(tuple(vars(value).values()), module)
        elif isinstance(value, CodeType):
            yield value
            yield from _codes(value.co_consts, module)
        else:
            function = getattr(value, "__wrapped__", value)
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield from _codes((function.__code__,), module)
