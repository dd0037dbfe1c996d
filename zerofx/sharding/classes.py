"""Generated module classes whose properties read parameters through the `unshard` marker.

A sharded module keeps its name, module and behaviour; only the type differs. Inside a forward
(while compiling, inside a module's call, or inside backward, where checkpointing recomputes) a
parameter reads as its full value. Everywhere else it reads as the `nn.Parameter` that holds the
`DTensor`, and nothing is communicated.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrize

from zerofx.ir.ops import UNSHARD
from zerofx.runtime.params import ParamState
from zerofx.sharding.moves import apply_around
from zerofx.sharding.reading import (
    READS,
    STATES,
    bound_states,
    in_forward,
    is_bound,
    read_eagerly,
    refuse_removal,
)
from zerofx.sharding.rows import cut
from zerofx.torch_private import trace_inside, trace_outside

_NAMES = "_zerofx_names"


def bind(module: nn.Module, states: dict[str, ParamState]) -> None:
    """Give `module` the generated class of its type, and its parameters' states."""
    if not is_bound(module):
        module.register_load_state_dict_pre_hook(_cut_loaded)
    known = module.__dict__.setdefault(STATES, {})
    known.update(states)
    _follow(module)


def unbind(module: nn.Module, names: Iterable[str]) -> list[ParamState]:
    """Forget parameters that `module` no longer owns, or that are about to be replaced.

    Returns:
        Their states.
    """
    known = module.__dict__.get(STATES, {})
    gone = [known.pop(name) for name in names if name in known]
    if gone:
        _follow(module)
    return gone


def _follow(module: nn.Module) -> None:
    """Let class and layouts agree with the states."""
    known = module.__dict__[STATES]
    module.__dict__[READS] = _reads(module)
    _become(module, _class_for(type(module), tuple(sorted(known))))
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)


def _reads(module: nn.Module) -> dict[str, tuple[tuple[int, ...], int, torch.dtype | None]]:
    specs = {name: state.spec for name, state in bound_states(module).items()}
    return {name: (each.shape, each.layout.handle, each.cast) for name, each in specs.items()}


def _become(module: nn.Module, cls: type[nn.Module]) -> None:
    object.__setattr__(module, "__class__", cls)  # its own might set it on what it wraps


def _class_for(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The generated class for a module of a class that may be one already."""
    if issubclass(cls, fx.GraphModule) and cls.__qualname__.endswith(".GraphModuleImpl"):
        # torch.fx made it for this module, and writes to it whenever it generates code.
        cls.__bases__ = (_sharded_class(_plain_class(cls.__bases__[0]), names),)
        return cls
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


def _sharded_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """The one that has modules already, or a new one."""
    known = (each for each in type.__subclasses__(base) if vars(each).get(_NAMES) == names)
    return next(known, None) or _new_class(base, names)


def _new_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    def delete(self: nn.Module, name: str) -> None:
        refuse_removal(self, name)
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
        states = bound_states(self).values()
        moved = [known for known in states if known.param.dtype is not known.spec.dtype]
        for known in moved:
            known.rehouse()
        # Of a tied parameter, another module may have had it moved.
        if moved or vars(self).get(READS, {}) != _reads(self):
            _follow(self)
        return self

    body: dict[str, Any] = {name: _parameter_property(name) for name in names} | {_NAMES: names}
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
    if issubclass(base, nn.ParameterList):
        body["__getitem__"] = _read_slice(base)
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
                # Dynamo guards these; of a `DTensor` the rows that are here, but no global shape.
                size, layout, dtype = self._zerofx_reads[name]
                # Not all ranks run the same branches, but all gather.
                outside = trace_outside()
                # Naming the gradient's placements, which are these, would cost a guard of each.
                full = UNSHARD(param.to_local(), size, layout, dtype)
                if outside:
                    trace_inside()
                return full
        elif param is not None and name in self._zerofx_reads and in_forward():
            return read_eagerly(self, name, param)
        if param is _ABSENT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return param

    def write(self: Any, value: Any) -> None:
        # `nn.Module` comes here once the parameter is no longer registered.
        unbind(self, [name])
        setattr(self, name, value)

    return property(read, write)


_ABSENT = "absent"


def _cut_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: each rank takes its rows of plain full values."""
    for name, state in bound_states(module).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, DTensor) or not isinstance(value, Tensor):
            continue
        if value.shape == state.spec.shape:
            state_dict[prefix + name] = cut(value, state)


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    if not is_bound(self):  # made as `type(model)(…)`, and plain
        _become(self, _plain_class(type(self)))
        return self.__reduce_ex__(protocol)
    names = tuple(sorted(self.__dict__[STATES]))
    return _rebuild, (_plain_class(type(self)), names), _saved(self, self.__getstate__())


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
    if not is_bound(self):
        _become(self, _plain_class(type(self)))
        return copy.deepcopy(self, memo)
    cls = type(self)
    saved: Any = vars(self) if _is_parametrized(cls) else self.__getstate__()
    memo[id(self)] = made = cls.__new__(cls)
    made.__setstate__(copy.deepcopy(_saved(self, saved), memo))
    return made


def _saved(module: nn.Module, state: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What `__setstate__` wants. Parameters travel as their states, which rebuild buffers."""
    state, slots = state if isinstance(state, tuple) else (state, None)
    mine = state[STATES]
    params = {name: None if name in mine else p for name, p in module._parameters.items()}
    return {**state, "_parameters": params}, slots


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _sharded_class(base, names)
    return cls.__new__(cls)


def _read_slice(base: type[nn.ParameterList]) -> Any:
    def read(self: Any, index: Any) -> Any:
        # torch makes a `ParameterList` of them, which full values are not for.
        if isinstance(index, slice) and (is_compiling() or in_forward()):
            return [self[place] for place in range(*index.indices(len(self)))]
        return base.__getitem__(self, index)

    return read


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore(self: Any, value: Any) -> None:
    """RNNs cache their weights; the property reads them anew."""
