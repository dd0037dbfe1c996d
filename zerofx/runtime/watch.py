"""`Watch`: a thread that notices when this rank waits too long, and says why.

gloo closes every connection when a wait for a message times out, so a rank that waited with a
time-out would lose a peer that is merely slow. The rank waits without one, and this thread looks
on. Only when the journals prove that ranks issued different collectives, or a rank was declared
gone, does it use that very time-out to end the wait.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from zerofx.errors import DivergedError, RankGoneError, ZeroFxError
from zerofx.runtime.journal import Journal
from zerofx.runtime.roll_call import holder_gone
from zerofx.torch_private import is_broken_connection, is_message

_log = logging.getLogger(__name__)
_TICK = datetime.timedelta(milliseconds=1)
_GRACE_SECONDS = 2.0
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Watch:
    """Waits for collectives of one sharded model.

    Args:
        journal: what this rank issued.
        patience: seconds of waiting before journals are compared, and of silence before a rank
            counts as gone once a collective failed.
    """

    def __init__(self, journal: Journal, patience: float) -> None:
        self._journal = journal
        self._patience = patience
        self._waiting: tuple[Any, float] | None = None
        self._reading: tuple[int, float] | None = None
        self._found: ZeroFxError | None = None
        self._warned = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def wait(self, work: Any) -> None:
        """Wait for a collective on the CPU; inside `explained`."""
        self._waiting = (work, time.monotonic())
        try:
            self._wait_until_found(work)
        finally:
            self._waiting = None
            self._warned = False

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say why a collective failed, if ranks issued different ones or are gone.

        Raises:
            DivergedError: they issued different ones.
            RankGoneError: they are gone.
        """
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ZeroFxError) or not is_broken_connection(error):
                raise
            if self._found is None:
                self._found = self._explanation()
            if self._found is not None:
                raise self._found from error
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Around a number that is read from all ranks; if it takes long, it says where."""
        self._reading = threading.get_ident(), time.monotonic()
        try:
            yield
        finally:
            self._reading = None

    def stop(self) -> None:
        """End the thread; a daemon in C++ at interpreter exit would abort the process."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GRACE_SECONDS)

    def start(self) -> None:
        """Start the thread: it also answers other ranks while this one computes."""
        pause = self._patience / 2
        self._thread = threading.Thread(
            target=_look_on, args=(weakref.ref(self), self._stop, pause), daemon=True
        )
        self._thread.name = "zerofx watch"
        self._thread.start()
        _running.add(self)
        weakref.finalize(self, self._stop.set)

    def _wait_until_found(self, work: Any) -> None:
        if is_message(work):
            work.wait()
            return
        patience = datetime.timedelta(seconds=self._patience)
        while True:
            try:
                work.wait(patience)
                return
            except RuntimeError as error:
                if "imed out" not in str(error) or self._found is not None:
                    raise
                if work.is_completed():  # since then, or by a time-out of its own: it says so
                    work.wait()
                    return

    def _look(self) -> None:
        self._look_at_reading()
        waiting = self._waiting
        try:
            self._journal.answer()
            if waiting is None or time.monotonic() - waiting[1] < self._patience:
                return
            late = self._journal.explain_hang()
        except (DivergedError, RankGoneError) as error:
            self._found = error
            if waiting is not None:
                _interrupt(waiting[0])
            return
        if late and not self._warned:
            self._warned = True
            _log.warning("waiting in %s; %s", self._journal.last(), "; ".join(late))

    def _look_at_reading(self) -> None:
        reading = self._reading
        if reading is None or time.monotonic() - reading[1] < self._patience:
            return
        self._reading = None  # once is enough
        _log.warning(
            "%s waits for the other ranks: .item(), float(), bool() and the like of a sharded "
            "tensor, norms of gradients, view(-1) and updates of a plain average too, are "
            "collectives: every rank must come. Remedy: value = value.full_tensor() on all ranks "
            "first, or the same line on all of them",
            _place_of(reading[0]),
        )

    def _explanation(self) -> ZeroFxError | None:
        try:
            self._journal.explain_failure(self._patience)
        except (DivergedError, RankGoneError) as error:
            return error
        except RuntimeError as error:
            _log.debug("the store fails: %s", error)
            return holder_gone()
        return None


def _look_on(watched: weakref.ref[Watch], stop: threading.Event, pause: float) -> None:
    while not stop.wait(pause):
        watch = watched()
        if watch is None:
            return
        try:
            watch._look()
        except RuntimeError as error:
            _log.debug("the watch ends: %s", error)
            return
        del watch


def _place_of(thread: int) -> str:
    """The line of the user's program that a thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "a number"


def _interrupt(work: Any) -> None:
    """Let a wait in another thread fail: a time-out closes the connections it waits on."""
    if is_message(work):
        with contextlib.suppress(RuntimeError):
            work.wait(_TICK)


_running: weakref.WeakSet[Watch] = weakref.WeakSet()


def say_last_words(error: object) -> None:
    """Log which ranks are gone, if a collective that is not zerofx's failed for that.

    Args:
        error: what this process ends with.
    """
    if not isinstance(error, RuntimeError):
        return
    for watch in list(_running):
        try:
            with watch.explained():
                raise error
        except RuntimeError as found:
            if found is not error:
                _log.error("%s", found)
                return


@atexit.register
def _stop_all() -> None:
    say_last_words(getattr(sys, "last_value", None))
    for watch in list(_running):
        watch.stop()
