"""A save that is killed, wherever it is, never costs the last good checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of a process")
def test_a_save_killed_at_every_file_operation(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.killed", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Files of data, of metadata, and the renames: all were reached.
    assert int(done.stdout.split()[-1]) >= 8, done.stdout
