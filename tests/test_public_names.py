"""The names of `zerofx`: all there, and the heavy ones imported only when asked for."""

from __future__ import annotations

import inspect
import subprocess
import sys

import zerofx


def test_every_public_name_is_there() -> None:
    for name in zerofx.__all__:
        found = getattr(zerofx, name)
        assert callable(found) or inspect.ismodule(found), name
        assert name in dir(zerofx)
    assert not hasattr(zerofx, "explian")


def modules_after(code: str) -> set[str]:
    """What a fresh process has imported when it has run `code`."""
    script = f"import sys, contextlib, io\n{code}\nprint(*sys.modules)"
    run = [sys.executable, "-c", script]
    return set(subprocess.run(run, capture_output=True, text=True, check=True).stdout.split())


def test_names_are_imported_when_they_are_asked_for() -> None:
    loaded = modules_after("import zerofx; assert zerofx.config.ZeroConfig is zerofx.ZeroConfig")
    assert {name for name in loaded if name.startswith("zerofx")} == {
        "zerofx",
        "zerofx.config",
        "zerofx.errors",
        "zerofx.option_checks",
    }


def test_help_needs_no_compiler() -> None:
    code = "import zerofx.cli.main as cli\nwith contextlib.redirect_stdout(io.StringIO()):\n"
    code += "    assert cli.main(['completion', 'bash']) == 0"
    loaded = modules_after(code)
    assert "zerofx.cli.completion" in loaded
    assert not {"torch._dynamo", "torch._inductor", "zerofx.api", "zerofx.frontend"} & loaded
