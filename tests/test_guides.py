"""What the guides show is what happens: their scripts run, and their consoles are typed again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_SCRIPT = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.S | re.M)
_CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.S | re.M)


@pytest.mark.parametrize("guide", ["explain.md", "passes.md"])
def test_transcripts(guide: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / guide).read_text()
    for name, body in _SCRIPT.findall(text):
        (tmp_path / name).write_text(body)
    consoles = _CONSOLE.findall(text)
    assert consoles, f"{guide} has no console"
    for shown in consoles:
        assert _typed(shown, tmp_path) == shown


def _typed(shown: str, folder: Path) -> str:
    """The console with the output that its commands have here."""
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    lines: list[str] = []
    for command in re.findall(r"^\$ (.*)$", shown, re.M):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines += [f"$ {command}\n", done.stdout]
    return "".join(lines)
