"""What constructors do to tensors without memory is written down on a tape."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import TorchFunctionMode

from zerofx.errors import UnsupportedError
from zerofx.sharding.streams import Draw
from zerofx.sharding.tape import (
    ALLOCATE,
    Step,
    Tape,
    flat,
    is_recorded,
    leaves,
    replaced,
    sources_in,
    tensors_in,
)
from zerofx.torch_private import (
    DispatchMode,
    init_that_asks,
    is_mutable,
    storage_key,
    written_by,
)

_TO_META = (*ALLOCATE, "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "normal")

_current: ContextVar[Tape | None] = ContextVar("being recorded on", default=None)


@contextlib.contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Write down on `tape` what happens to tensors without memory."""
    token, recorder = _current.set(tape), _Recorder(tape)
    try:
        with _WholeCalls(tape, recorder), recorder:
            yield
    finally:
        _current.reset(token)
        tape.end()
        tape.streams.give_back()


def current_tape() -> Tape | None:
    """What is recorded on here, inside a block; `None` outside."""
    return _current.get()


def refuse_inside_block() -> None:
    """Refuse to make values where they are only recorded.

    Raises:
        UnsupportedError: a block of `meta_init` is open.
    """
    if current_tape() is not None:
        raise UnsupportedError(
            "a model is sharded inside a block of meta_init",
            "build it there, and shard it, or load its weights, after the block",
        )


class _Recorder(DispatchMode):
    """Sends allocations to the meta device, and writes down what happens to them."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ in _TO_META and "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        mixed = list(tensors_in((args, kwargs)))
        if not any(map(_on_meta, mixed)) and not _is_meta(kwargs.get("device")):
            if _draws(func):
                self._refuse_random(func, args, kwargs)
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            raise UnsupportedError(
                "a constructor inside meta_init asks for a value that does not exist yet (item(), "
                "tolist(), or a condition)",
                "compute it from torch.tensor, arange or linspace, whose values exist; or build "
                "the model outside of meta_init",
            )
        if not all(map(_on_meta, tensors_in(written_by(func, args, kwargs)))):
            raise UnsupportedError(
                "a constructor inside meta_init writes a value that does not exist yet into memory "
                f"that does ({func})",
                "make both tensors in the same way: with torch.empty, zeros, ones, full or rand",
            )
        before = {storage_key(value) for value in mixed if _on_meta(value)}
        # Real values meet values without memory: only shapes matter now.
        out = func(*replaced(args, _to_meta), **replaced(kwargs, _to_meta))
        results = tuple(self._note(value) for value in flat(out))
        fresh = any(ref is not None and ref.storage not in before for ref in results)
        if fresh or is_mutable(func):
            self._write_down(func, args, kwargs, results)
        return out

    def write_whole_call(self, function: Any, target: Tensor, given: dict[str, Any]) -> None:
        """Write down a function of `nn.init`, which may draw from torch's own generators, too."""
        self._paused = True
        try:
            given = replaced(given, self._note)
            draws = self._tape.streams.draw([*self._tape.streams.default, *sources_in(given)])
            step = Step(function, (self._tape.ref(target),), given, (None,), draws)
            self._tape.steps.append(step)
        finally:
            self._paused = False

    def _write_down(self, func: Any, args: Any, kwargs: Any, results: tuple[Any, ...]) -> None:
        args, kwargs = replaced(args, self._note), replaced(kwargs, self._note)
        draws: tuple[Draw, ...] = ()
        if _draws(func):
            streams = self._tape.streams
            draws = streams.draw([*sources_in((args, kwargs))] or streams.default)
        self._tape.steps.append(Step(func, args, kwargs, results, draws))

    def _note(self, value: Any) -> Any:
        if isinstance(value, Generator):
            return self._tape.streams.source(value)
        if isinstance(value, Tensor) and _on_meta(value):
            return self._tape.ref(value)
        return value.detach().clone() if isinstance(value, Tensor) else value

    def _refuse_random(self, func: Any, args: Any, kwargs: Any) -> None:
        """Numbers that are drawn at once would be those of what is only recorded."""
        streams = self._tape.streams
        given = [item for item in leaves((args, kwargs)) if isinstance(item, Generator)]
        if not given or any(streams.is_default(each) or streams.has_drawn(each) for each in given):
            raise UnsupportedError(
                "a constructor inside meta_init fills memory that exists with random numbers "
                f"({func})",
                "make the tensor with torch.empty, zeros, ones, full or rand, or pass a generator "
                "that nothing else draws from",
            )


class _WholeCalls(TorchFunctionMode):
    """Writes down whole those functions of `nn.init` that do nothing to tensors without memory.

    They ask for `is_meta` and return; what they would do depends on values (rejection sampling).
    """

    def __init__(self, tape: Tape, recorder: _Recorder) -> None:
        super().__init__()
        self._tape = tape
        self._recorder = recorder

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
            self._recorder.write_whole_call(function, target, given)


def _draws(func: Any) -> bool:
    """Whether an operation takes random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not _on_meta(value) else value


def _on_meta(value: Tensor) -> bool:
    return value.device.type == "meta"


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"
