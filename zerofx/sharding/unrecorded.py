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
_MOVED = "converted, moved or copied"
_WRITTEN = "written to, by apply, nn.init, fill_ or copy_, say,"
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


def changes(
    model: nn.Module, missing: Iterable[tuple[str, Tensor]], tape: Tape | None
) -> dict[str, str]:
    """What was done to tensors after the block that built them, by name, where it left a trace.

    Marked modules have others than the block made if no tape knows these. Writes through `.data`
    leave no trace, nor do functions of `nn.init` that leave meta tensors alone.

    Args:
        model: the model.
        missing: what needs values, by name.
        tape: of the block.
    """
    marked = {
        id(value)
        for module in model.modules()
        if _MARK in vars(module)
        for value in (*module._parameters.values(), *module._buffers.values())
    }
    written = tape.written_since() if tape else set[int]()
    found: dict[str, str] = {}
    for name, value in missing:
        if id(value) in marked and value.numel() and tape_of(value) is None:
            found[name] = _MOVED
        elif storage_key(value) in written:
            found[name] = _WRITTEN
    return found


def refuse_changes(found: dict[str, str]) -> None:
    """Refuse `changes`.

    Raises:
        UnsupportedError: names them.
    """
    for kind in (_MOVED, _WRITTEN):
        lost = [name for name, done in found.items() if done == kind]
        if lost:
            raise UnsupportedError(
                f"what was built without memory inside meta_init was {kind} after the block, which "
                "is not recorded",
                _REMEDY,
                lost,
            )
