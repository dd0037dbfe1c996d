"""What is done to a model after the block that built it: nothing records that, so it is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from zerofx.errors import UnsupportedError
from zerofx.sharding.tape import Tape, is_recorded, tape_of
from zerofx.torch_private import storage_key

_MARK = "_zerofx_meta_init"
_REMEDY = (
    "do it at the end of the block, where it is recorded: with zerofx.meta_init(): model = …; "
    "model.bfloat16(); or read the values from a file with zerofx.load_safetensors(model, path, "
    "config)"
)


@contextlib.contextmanager
def marking(tape: Tape) -> Iterator[None]:
    """Mark the modules that are given tensors of `tape` inside.

    Copies and pickles of a module have its mark, while their tensors have no tape.
    """

    def mark(module: nn.Module, _: str, value: Any) -> None:
        if is_recorded(value, tape):
            vars(module)[_MARK] = True

    hooks = (
        register_module_parameter_registration_hook(mark),
        register_module_buffer_registration_hook(mark),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def clear_marks(model: nn.Module) -> None:
    """Everything in `model` has values."""
    for module in model.modules():
        vars(module).pop(_MARK, None)


def refuse_moved(model: nn.Module, missing: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors of marked modules that no tape knows: they are others than the block made.

    Args:
        model: the model.
        missing: what needs values, by name.

    Raises:
        UnsupportedError: names them.
    """
    marked = {
        id(value)
        for module in model.modules()
        if _MARK in vars(module)
        for value in (*module._parameters.values(), *module._buffers.values())
    }
    lost = [(name, value) for name, value in missing if id(value) in marked and value.numel()]
    moved = [name for name, value in lost if tape_of(value) is None]
    if moved:
        raise UnsupportedError(
            "modules were built inside meta_init, then converted, moved or copied after it",
            _REMEDY,
            moved,
        )


def refuse_written(missing: Iterable[tuple[str, Tensor]], tape: Tape) -> None:
    """Refuse tensors that were written to after the block that recorded `tape`.

    Writes through `.data` leave no trace, nor do functions of `nn.init` that leave meta tensors
    alone.

    Raises:
        UnsupportedError: names them.
    """
    written = tape.written_since()
    lost = [name for name, value in missing if storage_key(value) in written]
    if lost:
        raise UnsupportedError(
            "values are written after the block of meta_init that built the model (by apply, "
            "nn.init, fill_ or copy_, say), into tensors that have no memory yet",
            _REMEDY,
            lost,
        )
