"""A save that is killed, wherever it is, never costs the last good checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scripts import run_module


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of a process")
def test_a_save_killed_at_every_file_operation(tmp_path: Path) -> None:
    done = run_module("tests.checkpoint.killed", str(tmp_path), timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    # Files of data, of metadata, and the renames: all were reached.
    assert int(done.stdout.split()[-1]) >= 8, done.stdout
