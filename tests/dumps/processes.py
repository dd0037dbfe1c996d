"""Scripts in processes of their own, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(script: Path, *arguments: str, **environment: str) -> str:
    """Run a script on two ranks; returns what they wrote to standard error.

    Args:
        script: what to run.
        arguments: of the script.
        environment: what to add to it.
    """
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **environment}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
