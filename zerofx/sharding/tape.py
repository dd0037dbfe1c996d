"""Building a model without memory: what its constructors do is written down, and done later.

The ideas are those of deferred initialisation (torchdistx) and of `zero.Init` (DeepSpeed).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from zerofx.errors import UnsupportedError
from zerofx.torch_private import DispatchMode, init_that_asks, is_mutable, storage_key

_TAPE = "_zerofx_tape"
_ALLOCATE = ("empty", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
_ALLOCATE_LIKE = ("empty_like",)
_TO_META = (*_ALLOCATE, "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "normal")
_RANDOM = ("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_")
_INIT = ("_no_grad_trunc_normal_", "orthogonal_", "dirac_", "sparse_")
_OVERWRITE = (*_RANDOM, *_INIT, "geometric_", "zero_", "fill_", "copy_")


@dataclasses.dataclass(frozen=True)
class Ref:
    """A tensor on the tape: a window on a storage, which a number names."""

    storage: int
    num_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def whole(self) -> bool:
        """Whether it shows all of its storage."""
        return self.size.numel() * self.dtype.itemsize == self.num_bytes


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation: references in place of tensors without memory.

    Attributes:
        op: an `OpOverload`, or a function of `nn.init`.
        args: positional arguments.
        kwargs: keyword arguments.
        results: what it returns, flattened; `None` for other things than tensors of the tape.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Ref | None, ...]

    @property
    def name(self) -> str:
        """Name of the operation without overload."""
        return getattr(self.op, "overloadpacket", self.op).__name__

    @property
    def storages(self) -> frozenset[int]:
        """Everything it reads or writes."""
        refs = [*refs_in(self.args), *refs_in(self.kwargs), *refs_in(self.results)]
        return frozenset(ref.storage for ref in refs)

    def overwrites(self, storage: int) -> bool:
        """Whether what was in `storage` does not matter from here on."""
        if self.name not in _OVERWRITE or not self.args or not isinstance(self.args[0], Ref):
            return False
        target, sources = self.args[0], refs_in(self.args[1:])
        apart = all(ref.storage != storage for ref in sources)
        return target.storage == storage and target.whole and apart

    @property
    def gives_values(self) -> bool:
        """Whether it does more than allocate."""
        return self.name not in (*_ALLOCATE, *_ALLOCATE_LIKE)


class Tape:
    """Operations in the order of construction.

    Attributes:
        steps: them.
        device: where they will run.
        random_state: of the generators at the first draw, CPU's and the device's.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: list[Step] = []
        self.device = device
        self.random_state = random_state(device)
        self._alive: list[torch.UntypedStorage] = []
        self._known: set[int] = set()
        self._draws = False

    def ref(self, value: Tensor) -> Ref:
        """What names `value`, whose storage knows the tape from here on."""
        key, storage = storage_key(value), value.untyped_storage()
        if key not in self._known:
            self._known.add(key)
            self._alive.append(storage)  # so that its number stays unique
            vars(storage)[_TAPE] = self
        stride, offset = value.stride(), int(value.storage_offset())
        return Ref(key, storage.nbytes(), value.dtype, value.shape, stride, offset)

    def begin_draw(self) -> None:
        """The next operation draws: recorded draws follow each other without another seed.

        Raises:
            UnsupportedError: a constructor seeded the generator since the first one.
        """
        if not self._draws:
            self._draws, self.random_state = True, random_state(self.device)
        if not torch.equal(torch.get_rng_state(), self.random_state[0]):
            raise UnsupportedError(
                "a constructor inside meta_init seeds the random generator after it drew from it",
                "seed before that, or draw from a torch.Generator of the model's own",
            )

    def written(self) -> set[int]:
        """Storages that are given values, and not only allocated, or copied from such."""
        done: set[int] = set()
        for step in filter(lambda step: step.gives_values, self.steps):
            read = {ref.storage for ref in refs_in((step.args, step.kwargs))}
            made = {ref.storage for ref in refs_in(step.results)} or read
            if made & read or read <= done:
                done |= made
        return done


def tape_of(value: Tensor) -> Tape | None:
    """The recording of a tensor without memory."""
    return vars(value.untyped_storage()).get(_TAPE)


class Recorder(DispatchMode):
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
        return func(*args, **(kwargs or {}))

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


@contextlib.contextmanager
def recording(tape: Tape) -> Iterator[None]:
    """Write down on `tape` what happens to tensors without memory."""
    with _WholeCalls(tape), Recorder(tape):
        yield


def random_state(device: torch.device) -> list[Tensor]:
    """Of the CPU's generator, and of the device's own if it has one."""
    on_device = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *on_device]


def flat(out: Any) -> list[Any]:
    """The things that an operation returns."""
    return list(out) if isinstance(out, (tuple, list)) else [out]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Tensors among arguments, nested ones too."""
    return (item for item in _leaves(value) if isinstance(item, Tensor))


def refs_in(value: Any) -> Iterator[Ref]:
    """References among arguments, nested ones too."""
    return (item for item in _leaves(value) if isinstance(item, Ref))


def replaced(value: Any, change: Any) -> Any:
    """`value` with `change` applied to its leaves."""
    if isinstance(value, dict):
        return {key: replaced(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)([replaced(item, change) for item in value])
    return change(value)


def _leaves(value: Any) -> Iterator[Any]:
    items: Iterable[Any] | None = None
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = value
    if items is None:
        yield value
    else:
        for item in items:
            yield from _leaves(item)


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) and not _on_meta(value) else value


def _on_meta(value: Tensor) -> bool:
    return value.device.type == "meta"


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"
