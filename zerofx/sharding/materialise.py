"""Parameters and buffers on the meta device become shards and real buffers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zerofx.errors import UnsupportedError
from zerofx.runtime.session import Session
from zerofx.sharding.agreement import agree
from zerofx.sharding.recorder import current_tape, recording
from zerofx.sharding.replay import replay, window
from zerofx.sharding.rows import own_rows
from zerofx.sharding.tape import Ref, Tape, ref_to, tape_of
from zerofx.sharding.unrecorded import changes, marking, refuse_changes
from zerofx.torch_private import storage_key

_REMEDY = (
    "build the model inside `with zerofx.meta_init():`, which records how values are made; or give "
    "the modules a reset_parameters() that sets them; or read them from a file with "
    "zerofx.load_safetensors(model, path, config)"
)
_REMEDY_INSIDE = (
    "give them values in the constructor, by nn.init or by torch.zeros in place of torch.empty; or "
    "read them from a file with zerofx.load_safetensors(model, path, config)"
)


@contextlib.contextmanager
def meta_init(device: str | torch.device | None = None) -> Iterator[None]:
    """Build models inside without memory; `zerofx.shard` makes their values, shard by shard.

    Constructors run, but their tensors have no memory: what would be done to them is recorded. When
    the model is sharded, that is done parameter by parameter, and a rank keeps its rows only.
    Values equal those of a single process with the seeds of rank 0, bit by bit, whatever the
    constructors do (custom initialisation, tied weights, buffers, conversions). After the block
    torch's generators are as they were before it, and given ones as they were when something was
    first drawn from them.

    What is done to the model between the block and its sharding is not recorded. Conversions,
    copies and writes are refused then, except for writes that leave no trace: through `.data`, and
    by `trunc_normal_`, `orthogonal_`, `sparse_` and `dirac_` of `nn.init`.

    A block inside of another one goes on with the outer one's recording.

    Args:
        device: where the model will live; by default the accelerator, or the CPU without one.

    Raises:
        UnsupportedError: a constructor asks for a value that does not exist yet, or writes one into
            a tensor that has memory; or a block inside of another one names another device.
    """
    outer = current_tape()
    if outer is not None:
        _refuse_other_device(outer, device)
        yield
        return
    tape = Tape(torch.device(device) if device is not None else default_device())
    with marking(tape), recording(tape):
        yield


def _refuse_other_device(outer: Tape, device: str | torch.device | None) -> None:
    """A block inside of another one goes on with its tape, which is replayed on one device."""
    inner = outer.device if device is None else torch.device(device)
    if inner.type != outer.device.type or _index(inner) != _index(outer.device):
        raise UnsupportedError(
            f"a block of meta_init({str(inner)!r}) lies inside of one for {outer.device}",
            "name the same device in both, or none in the inner one",
        )


def _index(device: torch.device) -> int:
    if device.index is None and device.type != "cpu":
        return torch.accelerator.current_device_index()
    return device.index or 0


def default_device() -> torch.device:
    """The current accelerator, or the CPU; where none was chosen yet, that of this local rank."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        local = os.environ.get("LOCAL_RANK")
        if kind.type == "cuda" and local is not None and not torch.cuda.is_initialized():
            torch.cuda.set_device(int(local) % torch.cuda.device_count())
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def on_meta(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers without memory, by name."""
    named = [*nn.Module.named_parameters(model), *model.named_buffers()]
    return [(name, value) for name, value in named if value.is_meta]


def device_of(model: nn.Module) -> torch.device:
    """Where the model lives, or will live."""
    tape = _tape_of(model)
    if tape is not None:
        return tape.device
    real = (param.device for param in model.parameters() if not param.is_meta)
    return next(real, None) or default_device()


def make_values(model: nn.Module, session: Session, but: Collection[int] = ()) -> dict[int, Tensor]:
    """Make what has no memory, except what `but` has by `id`; buffers are put in their place.

    Uses the recording of `meta_init`; without one, what `reset_parameters()` of the modules does,
    children before their parents, and `_init_weights()` of transformers' models.

    Returns:
        This rank's rows of each parameter, by the parameter's `id`.

    Raises:
        UnsupportedError: something would stay without a value; names it.
    """
    missing = [(name, value) for name, value in on_meta(model) if id(value) not in but]
    inside = _tape_of(model)
    built = {id(value) for _, value in missing if inside and tape_of(value) is inside}
    changed = changes(model, missing, inside)
    # Tensors that are refused must not get to know another tape.
    tape = inside or (Tape(session.device) if changed else _reset_tape(model, session.device))
    refs = {name: ref_to(value) for name, value in missing}
    agree(tape, refs, changed, session.world)
    refuse_changes(changed)
    _refuse_unset(missing, tape, built)
    wanted: dict[int, list[tuple[Tensor, Ref]]] = {}
    for name, value in missing:
        wanted.setdefault(refs[name].storage, []).append((value, refs[name]))
    rows: dict[int, Tensor] = {}
    buffers: dict[int, Tensor] = {}

    def finish(storage: int, whole: torch.UntypedStorage) -> None:
        for value, ref in wanted.get(storage, ()):
            full = window(whole, ref)
            if isinstance(value, nn.Parameter):
                domain = session.domain_for(value.shape)
                full = own_rows(full, domain)
                rows[id(value)] = full.clone(memory_format=torch.contiguous_format)
            else:
                buffers[id(value)] = full.clone()

    replay(tape, session.world, finish)
    put_buffers(model, buffers)
    return rows


def put_buffers(model: nn.Module, values: dict[int, Tensor]) -> None:
    """Put real buffers in the place of those without memory, which `values` has by `id`."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if id(buffer) in values:
                module._buffers[name] = values[id(buffer)]


def _tape_of(model: nn.Module) -> Tape | None:
    """The recording that made the model."""
    found = {id(tape): tape for _, value in on_meta(model) if (tape := tape_of(value)) is not None}
    if len(found) > 1:
        raise UnsupportedError(
            "parts of the model were built inside different `with zerofx.meta_init():` blocks",
            "build all of it inside one block",
        )
    return next(iter(found.values()), None)


def _reset_tape(model: nn.Module, device: torch.device) -> Tape:
    """Record what resetting the modules does, in the order in which they were constructed."""
    tape = Tape(device)
    empty = [module for module in _children_first(model) if _is_empty(module)]
    with recording(tape):
        for module in empty:
            reset = getattr(module, "reset_parameters", None)
            reset = reset or getattr(module, "_reset_parameters", None)
            if callable(reset):
                reset()
        weights: Any = getattr(model, "_init_weights", None)
        if callable(weights) and hasattr(model, "init_weights"):
            for module in empty:
                weights(module)
    return tape


def _is_empty(module: nn.Module) -> bool:
    """Whether nothing in `module` has memory, so that resetting it loses nothing."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and all(value.is_meta for value in tensors)


def _children_first(model: nn.Module) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child not in seen:
                seen.add(child)
                yield from visit(child)
        yield module

    return visit(model)


def _refuse_unset(missing: list[tuple[str, Tensor]], tape: Tape, built: set[int]) -> None:
    written = tape.written()
    lost = [
        (name, value)
        for name, value in missing
        if value.numel() and storage_key(value) not in written
    ]
    if lost:
        inside = all(id(value) in built for _, value in lost)
        raise UnsupportedError(
            "nothing says which values these have",
            _REMEDY_INSIDE if inside else _REMEDY,
            [f"{name} ({_kind(value)})" for name, value in lost],
        )


def _kind(value: Tensor) -> str:
    return "parameter" if isinstance(value, nn.Parameter) else "buffer"
