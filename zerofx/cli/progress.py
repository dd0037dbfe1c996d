"""A progress bar for work that takes longer than two seconds."""

from __future__ import annotations

import threading
from types import TracebackType

from rich import progress
from rich.console import Console

_PATIENCE = 2.0


class Progress:
    """Says on stderr what is being done; nothing there if that is no terminal.

    Use as a context manager; the bar appears after two seconds and leaves no trace.
    """

    def __init__(self, console: Console) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            console=console,
            transient=True,
            # It would put streams back that were others when it appeared.
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)
        self._timer = threading.Timer(_PATIENCE, self._bar.start)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        self._timer.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._timer.join()
        self._bar.stop()

    def expect(self, total: int) -> None:
        """There will be `total` steps."""
        self._bar.update(self._task, total=total)

    def step(self, what: str) -> None:
        """The next step, `what`, begins."""
        begun = self._bar.tasks[0].description != ""
        self._bar.update(self._task, description=what, advance=1 if begun else 0)
