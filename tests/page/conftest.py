"""One browser and a few dumps for all tests of the page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.page.browser import MISSING, BrowserEnded, Tab, browser, find_browser
from tests.page.dumps import dump_gpt, rehearse
from zerofx.frontend.rehearsal import Rehearsal


@pytest.fixture(scope="session")
def tab() -> Iterator[Tab]:
    if not find_browser():
        pytest.skip(MISSING)
    with contextlib.ExitStack() as stack:
        try:
            found = stack.enter_context(browser())
        except (BrowserEnded, BrokenPipeError):
            pytest.skip("the browser that is installed here does not start")
        yield found


@pytest.fixture(scope="session")
def gpt() -> Rehearsal:
    """Of four blocks."""
    return rehearse(4)


@pytest.fixture(scope="session")
def pages(gpt: Rehearsal, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Pages of dumps by stage."""
    folders = {stage: tmp_path_factory.mktemp(f"stage{stage}") for stage in (1, 3)}
    for stage, folder in folders.items():
        dump_gpt(folder, gpt, stage)
    return {stage: folder / "report.html" for stage, folder in folders.items()}
