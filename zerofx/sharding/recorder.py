"""What constructors do to tensors without memory is written down on a tape."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerofx.errors import UnsupportedError
from zerofx.sharding.tape import ALLOCATE, Step, Tape, flat, is_recorded, replaced, tensors_in
from zerofx.torch_private import DispatchMode, init_that_asks, is_mutable, storage_key

_TO_META = (*ALLOCATE, "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "normal")


_current: ContextVar[Tape | None] = ContextVar("being recorded on", default=None)


@contextlib.contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Write down on `tape` what happens to tensors without memory."""
    token = _current.set(tape)
    try:
        with _WholeCalls(tape), _Recorder(tape):
            yield
    finally:
        _current.reset(token)
        tape.end()


def current_tape() -> Tape | None:
    """What is recorded on here, inside a block; `None` outside."""
    return _current.get()


class _Recorder(DispatchMode):
    """Sends allocations to the meta device, and writes down what happens to them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.overloadpacket.__name__ in _TO_META and "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        mixed = list(tensors_in((args, kwargs)))
        if not any(map(_on_meta, mixed)) and not _is_meta(kwargs.get("device")):
            _refuse_random(func, kwargs)
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise UnsupportedError(
                "a constructor inside meta_init asks for a value that does not exist yet (item(), "
                "tolist(), or a condition)",
                "compute it from torch.tensor, arange or linspace, whose values exist; or build "
                "the model outside of meta_init",
            )
        if is_mutable(func) and isinstance(args[0], Tensor) and not _on_meta(args[0]):
            raise UnsupportedError(
                "a constructor inside meta_init writes a value that does not exist yet into memory "
                f"that does ({func})",
                "make both tensors in the same way: with torch.empty, zeros, ones, full or rand",
            )
        if _draws(func, kwargs):
            self._tape.begin_draw()
        before = {storage_key(value) for value in mixed if _on_meta(value)}
        # Real values meet values without memory: only shapes matter now.
        out = func(*replaced(args, _to_meta), **replaced(kwargs, _to_meta))
        results = tuple(self._note(value) for value in flat(out))
        fresh = any(ref is not None and ref.storage not in before for ref in results)
        if fresh or is_mutable(func):
            step = Step(func, replaced(args, self._note), replaced(kwargs, self._note), results)
            self._tape.steps.append(step)
        return out

    def _note(self, value: Any) -> Any:
        if isinstance(value, Tensor) and _on_meta(value):
            return self._tape.ref(value)
        return value.detach().clone() if isinstance(value, Tensor) else value


class _WholeCalls(TorchFunctionMode):
    """Writes down whole those functions of `nn.init` that do nothing to tensors without memory.

    They ask for `is_meta` and return; what they would do depends on values (rejection sampling).
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (asking := init_that_asks(func)) is not None:
            self._write_down(asking)
        out = func(*args, **(kwargs or {}))
        for value in tensors_in((args, kwargs, out)):
            if is_recorded(value, self._tape):
                self._tape.follow(value)
        return out

    def _write_down(self, frame: FrameType) -> None:
        function = frame.f_globals[frame.f_code.co_name]
        given = {name: frame.f_locals[name] for name in inspect.signature(function).parameters}
        target = given.pop("tensor")
        if _on_meta(target):
            self._tape.begin_draw()
            step = Step(function, (self._tape.ref(target),), given, (None,))
            self._tape.steps.append(step)


def _refuse_random(func: Any, kwargs: dict[str, Any]) -> None:
    """Random numbers that are drawn at once would be those of what is only recorded."""
    if _draws(func, kwargs):
        raise UnsupportedError(
            f"a constructor inside meta_init fills memory that exists with random numbers ({func})",
            "make the tensor with torch.empty, zeros, ones, full or rand, or pass a generator",
        )


def _draws(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation takes numbers from torch's own generator."""
    return torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not _on_meta(value) else value


def _on_meta(value: Tensor) -> bool:
    return value.device.type == "meta"


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"
