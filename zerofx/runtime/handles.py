"""The one piece of global state: integer handles to what ops need at run time.

Op schemas carry only tensors and scalars, so a marker names its `Domain` by an integer. The table
holds domains weakly: a model that is gone takes its handles with it.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from zerofx.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from zerofx.runtime.domain import Domain
    from zerofx.runtime.params import ParamState
    from zerofx.runtime.session import Session

_domains: weakref.WeakValueDictionary[int, Domain] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def new_handle() -> int:
    """A handle that no domain of this process had before."""
    return next(_numbers)


def open_handle(handle: int, domain: Domain) -> None:
    """Make `domain` findable while it lives."""
    _domains[handle] = domain


def domain_of(handle: int) -> Domain:
    """The domain behind `handle`."""
    try:
        return _domains[handle]
    except KeyError:
        raise UnsupportedError(
            "a compiled program outlived the sharded model it belongs to",
            "torch.compiler.reset(), and compile again what has run on it; if that was pickled or "
            "copied, use the copy's own forward",
        ) from None


def find_domain(handle: int) -> Domain | None:
    """The domain behind `handle`, while it lives."""
    return _domains.get(handle)


def live_domains() -> list[Domain]:
    """All domains that are alive, oldest first."""
    alive = dict(_domains.items())  # one may go at any time, between its key and its value, too
    return [alive[handle] for handle in sorted(alive)]


def live_sessions() -> list[Session]:
    """The sharded models that are alive, oldest first."""
    return list({id(domain.session): domain.session for domain in live_domains()}.values())


def sessions_on(mesh: DeviceMesh) -> list[Session]:
    """The sharded models that are alive and lie on `mesh`, oldest first."""
    # By equality: torch caches the meshes of results, so that one may be an older model's.
    return [session for session in live_sessions() if session.mesh == mesh]


@contextlib.contextmanager
def reading(mesh: DeviceMesh) -> Iterator[bool]:
    """Around values that are read from all ranks: if that takes long, the log says where.

    Yields:
        Whether a sharded model lies on `mesh`.
    """
    sessions = sessions_on(mesh)
    with sessions[-1].watch.reading() if sessions else contextlib.nullcontext():
        yield bool(sessions)  # the youngest model's watch: any will do


def note_call(call: str, name: str, params: Iterable[Tensor]) -> None:
    """Note in the journals of the models of `params` that this rank comes to `call`.

    All their ranks come to it together: one that comes alone is told by it.
    """
    states = states_by_param()
    known = (states[id(param)] for param in params if id(param) in states)
    for session in dict.fromkeys(state.domain.session for state in known):
        session.journal.record(call, name)


def states_by_param() -> dict[int, ParamState]:
    """The sharded parameters that are alive, by `id`."""
    return {id(state.param): state for session in live_sessions() for state in session.states}
