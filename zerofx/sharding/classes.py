"""Generated module classes whose properties read parameters through the `unshard` marker.

A sharded module keeps its name, module and behaviour; only the type differs. Inside a forward
(while compiling, inside a module's call, or inside backward, where checkpointing recomputes) a
parameter reads as its full value. Everywhere else it reads as the `nn.Parameter` that holds the
`DTensor`, and nothing is communicated.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerofx.ir.ops import UNSHARD
from zerofx.runtime.handles import live_domains
from zerofx.runtime.params import ParamState
from zerofx.torch_private import backward_id, skip_frames_of

_HANDLES = "_zerofx_layouts"
_STATES = "_zerofx_states"
_CALL_FILE = nn.Module._call_impl.__code__.co_filename


def bind(module: nn.Module, states: dict[str, ParamState]) -> None:
    """Give `module` the generated class of its type, and its parameters' states."""
    known = module.__dict__.setdefault(_STATES, {})
    known.update(states)
    module.__dict__[_HANDLES] = {name: state.spec.layout.handle for name, state in known.items()}
    base = plain_class(type(module))
    module.__class__ = _sharded_class(base, tuple(sorted(known)))
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)


def is_bound(module: nn.Module) -> bool:
    """Whether `module` has a generated class."""
    return _STATES in module.__dict__


def bound_states(module: nn.Module) -> dict[str, ParamState]:
    """States of the parameters that `module` itself owns, by attribute name."""
    return dict(module.__dict__.get(_STATES, {}))


def plain_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The user's class behind a generated one; any other class itself."""
    return cls.__dict__.get("_zerofx_base", cls)


def read_full(param: Tensor, layout: int) -> Tensor:
    """The full value of a sharded parameter, differentiable; communicates when run eagerly."""
    value = cast(DTensor, param)
    shard = value.to_local(grad_placements=value.placements)
    return UNSHARD(shard, value.shape, layout)


@torch.compiler.disable
def _read_eagerly(param: Tensor, layout: int) -> Tensor:
    # Around code that Dynamo skipped it would compile DTensor's own frames.
    return read_full(param, layout)


@functools.cache
def _sharded_class(base: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    body: dict[str, Any] = {name: _parameter_property(name) for name in names}
    body.update(
        __module__=base.__module__,
        __qualname__=base.__qualname__,
        __doc__=base.__doc__,
        __reduce_ex__=_reduce_ex,
        __setstate__=_setstate,
        register_parameter=_register_parameter,
        _zerofx_base=base,
    )
    if issubclass(base, nn.RNNBase):
        body["_flat_weights"] = property(_flat_weights, _ignore)
    return _subclass_quietly(base, body)


def _subclass_quietly(base: type[nn.Module], body: dict[str, Any]) -> type[nn.Module]:
    """A subclass of `base` without running its `__init_subclass__`.

    That hook may want arguments, or register the class; it ran for the user's class already.
    """
    if "__slots__" in base.__dict__ or base.__init_subclass__ is nn.Module.__init_subclass__:
        return type(base)(base.__name__, (base,), body)
    made = type(base)(base.__name__, (nn.Module,), body)
    made.__bases__ = (base,)
    return made


def _parameter_property(name: str) -> property:
    def read(self: nn.Module) -> Any:
        param = self._parameters.get(name, _ABSENT)
        if param is _ABSENT:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if param is None or name not in self._zerofx_layouts:
            return param
        if torch.compiler.is_compiling():
            return read_full(param, self._zerofx_layouts[name])
        return _read_eagerly(param, self._zerofx_layouts[name]) if _in_forward() else param

    skip_frames_of(read)  # inlined where Dynamo meets it, but no frame of its own
    return property(read)


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


def _register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
    plain_class(type(self)).register_parameter(self, name, param)
    states = self.__dict__[_STATES]
    state = _state_of(param)
    if state is None:
        states.pop(name, None)
        self.__dict__[_HANDLES].pop(name, None)
    else:
        bind(self, {name: state})


def _state_of(param: Tensor | None) -> ParamState | None:
    for domain in live_domains():
        for state in domain.session.states:
            if state.param is param:
                return state
    return None


def _reduce_ex(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    # Parameters travel as their states, which know how to rebuild buffers.
    state = self.__dict__.copy()
    mine = set(state[_STATES])
    state["_parameters"] = {
        name: None if name in mine else param for name, param in self._parameters.items()
    }
    return _rebuild, (plain_class(type(self)), tuple(sorted(mine))), state


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = _sharded_class(base, names)
    return cls.__new__(cls)


def _setstate(self: nn.Module, state: dict[str, Any]) -> None:
    plain_class(type(self)).__setstate__(self, state)
    for name, known in bound_states(self).items():
        self._parameters[name] = known.param
    bind(self, {})


def _flat_weights(self: Any) -> list[Any]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _ignore(self: Any, value: Any) -> None:
    """RNNs cache their weights; the property reads them anew."""
