"""Fixtures that the whole test tree shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.rank_failures import native_crashes
from tests.ranks import close_pools


@pytest.fixture(scope="session", autouse=True)
def pools() -> Iterator[None]:
    """Closes the pools of gloo ranks, which start on first use, when the session ends."""
    yield
    close_pools()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what crashed in C++ and ran once more; see `tests.ranks`."""
    for crash in native_crashes:
        terminalreporter.section("crashed in C++, then ran once more")
        terminalreporter.write_line(crash)
