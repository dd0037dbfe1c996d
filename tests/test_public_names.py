"""The names of `zerofx`: all there, and the heavy ones imported only when asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys

import zerofx

HEAVY = ("zerofx.integrations", "zerofx.checkpoint", "zerofx.debug", "zerofx.cli")


def test_every_public_name_is_there() -> None:
    for name in zerofx.__all__:
        found = getattr(zerofx, name)
        assert callable(found) or inspect.ismodule(found), name
        assert name in dir(zerofx)
    assert not hasattr(zerofx, "explian")


def test_a_plain_import_loads_no_heavy_package() -> None:
    code = "import sys, zerofx; print(*(name for name in sys.modules if name.startswith('zerofx')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "zerofx.frontend.backend" in loaded
    assert [name for name in loaded if name.startswith(HEAVY)] == []
