"""Fixtures that the whole test tree shares."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.frames import with_room_for_frames
from tests.linker import quick_linker
from tests.rank_failures import native_crashes
from tests.ranks import close_pools

# Other tests use the processors, too: no example has to be quick.
hypothesis.settings.register_profile("zerofx", deadline=None)
hypothesis.settings.load_profile("zerofx")


def pytest_configure(config: pytest.Config) -> None:
    """All processes of a run share what Inductor compiles; the next run starts with nothing."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="zerofx_inductor_", ignore_cleanup_errors=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        # A pool of compilers would import torch in processes of its own, and so would trials of
        # what the processor can do.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
        os.environ["COMPILER_PATH"] = quick_linker(Path(folder.name) / "linker")
        config.add_cleanup(folder.cleanup)


def pytest_collection_finish() -> None:
    """Leaves out of later collections, and of zerofx's own searches, what lives for the session."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """Calls tests with room for frames, since many trace models in the process of pytest."""
    test = pyfuncitem.obj
    pyfuncitem.obj = functools.partial(with_room_for_frames, test)
    yield
    pyfuncitem.obj = test


@pytest.fixture(scope="session", autouse=True)
def pools() -> Iterator[None]:
    """Closes the pools of gloo ranks, which start on first use, when the session ends."""
    yield
    close_pools()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Where pytest runs in several processes, tells the one that prints what crashed in this."""
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["native_crashes"] = native_crashes


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Hears what one of several processes has to tell at its end."""
    native_crashes.extend(getattr(node, "workeroutput", {}).get("native_crashes", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Shows what crashed in C++ and ran once more; see `tests.ranks`."""
    for crash in native_crashes:
        terminalreporter.section("crashed in C++, then ran once more")
        terminalreporter.write_line(crash)
