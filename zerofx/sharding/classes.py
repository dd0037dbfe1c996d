"""Generated module classes whose properties read parameters through the `unshard` marker.

A sharded module keeps its name, module and behaviour; only the type differs. Inside a forward
(while compiling, inside a module's call, or inside backward, where checkpointing recomputes) a
parameter reads as its full value. Everywhere else it reads as the `nn.Parameter` that holds the
`DTensor`, and nothing is communicated.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from zerofx.errors import UnsupportedError
from zerofx.ir.ops import UNSHARD
from zerofx.runtime.parameter import Sharded
from zerofx.runtime.params import ParamState
from zerofx.sharding.moves import apply_around
from zerofx.sharding.refuse import refuse_past_recompile_limit
from zerofx.sharding.rows import cut
from zerofx.torch_private import (
    backward_id,
    below_transforms,
    inside_transform,
    local_part,
)

_READS = "_zerofx_reads"
_STATES = "_zerofx_states"
_CALL_FILE = nn.Module._call_impl.__code__.co_filename


def bind(module: nn.Module, states: dict[str, ParamState]) -> None:
    """Give `module` the generated class of its type, and its parameters' states."""
    if not is_bound(module):
        module.register_load_state_dict_pre_hook(_cut_loaded)
    known = module.__dict__.setdefault(_STATES, {})
    known.update(states)
    _follow(module)


def unbind(module: nn.Module, names: Iterable[str]) -> list[ParamState]:
    """Forget parameters that `module` no longer owns, or that are about to be replaced.

    Returns:
        Their states.
    """
    known = module.__dict__[_STATES]
    gone = [known.pop(name) for name in names if name in known]
    if gone:
        _follow(module)
    return gone


def _follow(module: nn.Module) -> None:
    """Let class and layouts agree with the states."""
    known = module.__dict__[_STATES]
    module.__dict__[_READS] = {
        name: (state.spec.layout.handle, state.spec.cast) for name, state in known.items()
    }
    module.__class__ = _class_for(type(module), tuple(sorted(known)))
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)


def is_bound(module: nn.Module) -> bool:
    """Whether `module` has a generated class."""
    return _STATES in module.__dict__


def bound_states(module: nn.Module) -> dict[str, ParamState]:
    """States of the parameters that `module` itself owns, by attribute name."""
    return dict(module.__dict__.get(_STATES, {}))


def _class_for(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The generated class for a module of a class that may be one already."""
    if not _is_parametrized(cls):
        return _sharded_class(_plain_class(cls), names)
    # torch takes its own class off again, or a property from it: that one stays outermost.
    below = _sharded_class(_plain_class(cls.__bases__[0]), names)
    body = {name: value for name, value in vars(cls).items() if name not in _NOT_COPIED}
    return type(cls.__name__, (below,), body)


_NOT_COPIED = ("__dict__", "__weakref__", "__deepcopy__")


def _is_parametrized(cls: type[nn.Module]) -> bool:
    """Whether `torch.nn.utils.parametrize` made it, for one module."""
    return cls.__module__ == parametrize.__name__ and cls.__name__.startswith("Parametrized")


def _plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The user's class behind a generated one; any other class itself."""
    return cls.__dict__.get("_zerofx_base", cls)


def _read_eagerly(module: nn.Module, name: str, param: Any) -> Tensor:
    if not isinstance(below_transforms(param), DTensor):
        return param
    state = bound_states(module)[name]
    if inside_transform():
        raise UnsupportedError(
            f"a torch.func transform runs over a sharded {type(module).__name__}",
            "give it full values: with zerofx.unshard(model, writeback=False) as values: "
            "torch.func.functional_call(model, values, inputs)",
            [state.spec.name],
        )
    refuse_past_recompile_limit(state.spec.name)
    session = state.domain.session
    if backward_id() >= 0:
        kept = session.handed_out.kept_for(state)
        if kept is not None:
            return kept
    elif session.config.broadcast_buffers and (own := list(module.buffers(recurse=False))):
        # Where Dynamo skipped the frame no program does it: BatchNorm next to an LSTM.
        part, trains = (id(module), name), torch.is_grad_enabled()
        session.buffers.before_eager_part(session, part, own, trains=trains)
        if module.training and getattr(module, "track_running_stats", False):
            session.buffers.will_change(own)
    shard, spec = local_part(param, Sharded), state.spec
    value = UNSHARD(shard, param.shape, spec.layout.handle, spec.cast)
    session.handed_out.add(state, value)
    return value


# Around code that Dynamo skipped it would compile DTensor's own frames.
_read_quietly: Any = torch.compiler.disable(_read_eagerly)


@functools.cache
def _sharded_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def delete(self: nn.Module, name: str) -> None:
        base.__delattr__(self, name)
        unbind(self, [name])

    def restore(self: nn.Module, saved: tuple[dict[str, Any], dict[str, Any] | None]) -> None:
        state, slots = saved
        base.__setstate__(self, state)
        for name, value in (slots or {}).items():
            setattr(self, name, value)
        for name, known in bound_states(self).items():
            self._parameters[name] = known.param
        bind(self, {})

    def apply(self: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> nn.Module:
        params = {name: known.param for name, known in bound_states(self).items()}
        apply_around(self, params, fn, lambda: base._apply(self, fn, *args, **kwargs))
        return self

    body: dict[str, Any] = {name: _parameter_property(name) for name in names}
    body.update(
        __module__=base.__module__,
        __qualname__=base.__qualname__,
        __doc__=base.__doc__,
        __reduce_ex__=_reduce_ex,
        __setstate__=restore,
        __delattr__=delete,
        _apply=apply,
        _zerofx_base=base,
    )
    if not hasattr(base, "__deepcopy__"):
        body["__deepcopy__"] = _deepcopy
    if issubclass(base, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, _ignore)
    make: Any = type(base)
    with _quiet(base):
        return make(base.__name__, (base,), body)


@contextlib.contextmanager
def _quiet(base: type[nn.Module]) -> Iterator[None]:
    """Keep the user's `__init_subclass__` from running for a generated class.

    That hook may want arguments, or register the class; it ran for the user's class already.
    """
    own = vars(base).get("__init_subclass__")
    setattr(base, "__init_subclass__", classmethod(lambda cls, **kwargs: None))  # noqa: B010
    try:
        yield
    finally:
        if own is None:
            delattr(base, "__init_subclass__")
        else:
            setattr(base, "__init_subclass__", own)  # noqa: B010


def _parameter_property(name: str) -> property:
    def read(self: Any) -> Any:
        param = self._parameters.get(name, _ABSENT)
        if is_compiling():
            # Every instruction is traced at every read, so they are few.
            # functional_call puts plain values here.
            if isinstance(param, DTensor) and name in self._zerofx_reads:
                layout, dtype = self._zerofx_reads[name]
                # Naming the gradient's placements, which are these, would cost a guard of each.
                return UNSHARD(param.to_local(), param.shape, layout, dtype)
        elif param is not None and name in self._zerofx_reads and _in_forward():
            return _read_quietly(self, name, param)
        if param is _ABSENT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return param

    def write(self: Any, value: Any) -> None:
        # `nn.Module` comes here once the parameter is no longer registered.
        unbind(self, [name])
        setattr(self, name, value)

    return property(read, write)


_ABSENT = "absent"


def _in_forward() -> bool:
    if backward_id() >= 0:
        return True
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_call_impl" and code.co_filename == _CALL_FILE:
            return True
        frame = frame.f_back
    return False


def _cut_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: each rank takes its rows of plain full values."""
    for name, state in bound_states(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) or not isinstance(value, Tensor):
            continue
        if value.shape == state.spec.shape:
            state_dict[prefix + name] = cut(value, state)


def _reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    names = tuple(sorted(self.__dict__[_STATES]))
    return _rebuild, (_plain_class(type(self)), names), _saved(self, self.__getstate__())


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    cls = type(self)
    saved: Any = vars(self) if _is_parametrized(cls) else self.__getstate__()
    memo[id(self)] = made = cls.__new__(cls)
    made.__setstate__(copy.deepcopy(_saved(self, saved), memo))
    return made


def _saved(module: nn.Module, state: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `__setstate__` wants. Parameters travel as their states, which rebuild buffers."""
    state, slots = state if isinstance(state, tuple) else (state, None)
    mine = state[_STATES]
    params = {name: None if name in mine else p for name, p in module._parameters.items()}
    return {**state, "_parameters": params}, slots


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _sharded_class(base, names)
    return cls.__new__(cls)


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore(self: Any, value: Any) -> None:
    """RNNs cache their weights; the property reads them anew."""
