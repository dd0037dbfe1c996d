"""Who watches: whoever runs a user's program sees what becomes of each of its graphs.

`zerofx explain` runs a script that compiles as always; the backend tells this context's watcher.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Protocol

from torch import fx

from zerofx.frontend.partition import Traced
from zerofx.runtime.session import Session


class GraphWatcher(Protocol):
    """Is told what becomes of one Dynamo graph."""

    def traced(self, traced: Traced) -> None:
        """It has a backward; its program changes afterwards."""

    def ran(self) -> None:
        """Its forward is about to run."""


Watch = Callable[[fx.GraphModule, Session | None], GraphWatcher]
"""Called with each graph that is compiled, and the sharded model that it belongs to."""

_WATCH: contextvars.ContextVar[Watch | None] = contextvars.ContextVar("watch", default=None)


@contextlib.contextmanager
def watched_by(watch: Watch) -> Iterator[None]:
    """All graphs that are compiled inside are shown to `watch`."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def watcher_of(module: fx.GraphModule, session: Session | None) -> GraphWatcher | None:
    """The watcher of a graph; `None` if nobody watches."""
    watch = _WATCH.get()
    return None if watch is None else watch(module, session)
