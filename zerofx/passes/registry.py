"""Passes that hold for every model: registered by the program, or by installed packages."""

from __future__ import annotations

import dataclasses
import functools
import sys
from importlib.metadata import EntryPoint, entry_points
from types import TracebackType
from typing import Any, cast

from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError
from zerofx.passes.base import Pass
from zerofx.passes.changes import Change, as_change

GROUP = "zerofx_passes"
"""Name of the entry-point group; see docs/passes.md."""

_SOURCE = "zerofx.register_pass"
_registered: list[Change] = []


class Registration:
    """What `register_pass` did, to be undone: `unregister()`, or the end of a `with` block."""

    def __init__(self, change: Change) -> None:
        self._change = change

    def unregister(self) -> None:
        """Undo it; doing so twice is no error."""
        _registered[:] = [each for each in _registered if each is not self._change]

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.unregister()


def register_pass(change: Pass | Change) -> Registration:
    """Change the pipeline of every model that is sharded from now on.

    Call it on every rank, before the first forward (or `zerofx.shard`), and leave it registered
    while the model is in use: ranks compare their passes when a model is sharded, and a model whose
    passes are registered or unregistered later refuses to run.

    Args:
        change: a pass, which goes to the end, or what `before`, `after`, `replace` or `without`
            returned.

    Returns:
        A context manager that takes it back, with a method `unregister`.

    Raises:
        ConfigError: it is no pass, or is registered already.
    """
    made = as_change(change, _SOURCE)
    if made in _registered:
        raise ConfigError(f"{made} is registered already", "unregister it first")
    _registered.append(made)
    return Registration(made)


def registered() -> tuple[Change, ...]:
    """What is registered now, in order."""
    return tuple(_registered)


def with_registered(config: ZeroConfig) -> ZeroConfig:
    """`config` with the passes of installed packages, then registered ones, before its own.

    Raises:
        ConfigError: an entry point fails to load or holds no pass; the package is named.
    """
    changes = [as_change(each) for each in config.passes]
    own = [each for each, change in zip(config.passes, changes, strict=True) if not change.source]
    return dataclasses.replace(config, passes=(*_installed(), *_registered, *own))


def refuse_changed(then: tuple[Change, ...]) -> None:
    """Raise unless what is registered now is what was registered `then`.

    Raises:
        ConfigError: names the passes.
    """
    now = registered()
    if now != then:
        raise ConfigError(
            "the program was compiled with other passes than are registered now",
            "register passes before the model is sharded, and leave them registered while it is in "
            'use; passes for one model belong in options={"passes": […]}',
            [f"not registered any more: {each}" for each in then if each not in now]
            + [f"registered since: {each}" for each in now if each not in then],
        )


def _installed() -> list[Change]:
    return [change for each in _points(tuple(sys.path)) for change in _load(each)]


@functools.lru_cache(maxsize=1)
def _points(path: tuple[str, ...]) -> list[EntryPoint]:
    """Kept until the search path changes: what all packages there say takes 10 ms to read."""
    return sorted(entry_points(group=GROUP), key=lambda each: (each.name, each.value))


def _load(point: EntryPoint) -> list[Change]:
    package = f"{point.dist.name} {point.dist.version}" if point.dist is not None else "unknown"
    source = f"entry point {point.name} of package {package}"
    try:
        value: Any = point.load()
        if callable(value) and not isinstance(value, (Pass, Change)):
            value = value()
    except Exception as error:
        raise ConfigError(
            f"{source} failed to load {point.value}: {type(error).__name__}: {error}",
            f"repair or uninstall {package.partition(' ')[0]}",
        ) from error
    several = isinstance(value, (list, tuple))
    return [as_change(each, source) for each in (cast("list[Any]", value) if several else [value])]
