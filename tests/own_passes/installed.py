"""`wicked.py` as a package of its own, built and installed by pip into an empty folder."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "wicked-passes"
version = "1.2"

[project.entry-points.zerofx_passes]
wicked = "wicked_passes:{function}"

[tool.setuptools]
py-modules = ["wicked_passes"]
"""


def install(folder: Path, function: str = "chosen") -> Path:
    """Build and install the package; returns the folder to import it from."""
    source, target = folder / "source", folder / "site"
    source.mkdir()
    shutil.copy(Path(__file__).parent / "wicked.py", source / "wicked_passes.py")
    (source / "pyproject.toml").write_text(PROJECT.format(function=function))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    options = ["--no-build-isolation", "--disable-pip-version-check", "--target", str(target)]
    subprocess.run([*pip, *options, str(source)], check=True, timeout=120)
    return target


@contextlib.contextmanager
def importable(site: str, choice: str) -> Iterator[None]:
    """The package can be found in the block, and registers `choice`."""
    with patch.object(sys, "path", [site, *sys.path]), patch.dict(os.environ, WICKED=choice):
        importlib.invalidate_caches()
        try:
            yield
        finally:
            sys.modules.pop("wicked_passes", None)
