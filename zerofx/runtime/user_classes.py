"""Sharded parameters that are of a user's class, too: `class NoDecay(nn.Parameter)`.

Optimizers sort parameters by class, and those of other geometries ask for methods of it.
"""

from __future__ import annotations

import copyreg
import inspect
from typing import Any, cast

from torch import Tensor, nn

from zerofx.runtime.parameter import ShardedParameter
from zerofx.torch_private import foreach_by_default

_CLASS = "_zerofx_class"
"""Attribute of a parameter of a user's class: that class. It travels with copies."""


def follow_class(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let `new`, which is sharded, be of the class of `old` as well."""
    if type(old) not in nn.Parameter.__mro__:
        vars(new)[_CLASS] = type(old)
        make_writable(new)


def make_writable(param: Any) -> None:
    """Turn a parameter that is a `DTensor` into a `ShardedParameter`: the object stays the same."""
    param.__class__ = class_like(vars(param).get(_CLASS, nn.Parameter))


def class_like(kind: type[nn.Parameter]) -> type[ShardedParameter]:
    """The class of sharded parameters that were of class `kind`; what torch's tensors do it leaves.

    Raises:
        TypeError: Python knows no class that is both.
    """
    if kind in nn.Parameter.__mro__:
        return ShardedParameter
    known = (each for each in type.__subclasses__(kind) if issubclass(each, ShardedParameter))
    return next(known, None) or _new_class(kind)


def _new_class(kind: type[nn.Parameter]) -> type[ShardedParameter]:
    usual = nn.Parameter.__mro__
    own = {name for each in kind.__mro__ if each not in usual for name in vars(each)}
    body = {
        # A user's `to` makes another object, of this class, which takes other arguments.
        name: inspect.getattr_static(ShardedParameter, name)
        for name in own
        if hasattr(Tensor, name) and not name.startswith("__")
    }
    body.update(__module__=kind.__module__, __qualname__=kind.__qualname__, __doc__=kind.__doc__)
    make: Any = type(kind)
    made = cast(type[ShardedParameter], make(kind.__name__, (ShardedParameter, kind), body))
    copyreg.pickle(made, copyreg.dispatch_table[ShardedParameter])
    foreach_by_default(made)
    return made
