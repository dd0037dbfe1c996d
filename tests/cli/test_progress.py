"""The progress bar: late, transient, and for terminals only."""

from __future__ import annotations

import contextlib
import io
import sys
import threading

import pytest
from rich.console import Console

from zerofx.cli import progress
from zerofx.cli.progress import Progress


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_says_what_it_does(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.2)
    said = io.StringIO()
    console = Console(file=said, force_terminal=terminal, width=80)
    begun = {thread.ident for thread in threading.enumerate()}
    streams = sys.stdout, sys.stderr
    with Progress(console) as bar, contextlib.redirect_stdout(sys.stderr):  # as `explain` does
        bar.expect(2)
        bar.step("tracing the model")
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer) and thread.ident not in begun:
                thread.join()
        bar.step("running the passes")
    assert (sys.stdout, sys.stderr) == streams
    assert ("running the passes" in said.getvalue()) == terminal


def test_short_work_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 1e6)
    said = io.StringIO()
    with Progress(Console(file=said, force_terminal=True, width=80)) as bar:
        bar.step("tracing the model")
    assert "tracing" not in said.getvalue()
