"""Scripts in processes of their own, under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(
    script: Path, *arguments: str, alone: bool = False, ranks: int = 2, **environment: str
) -> str:
    """Run a script on some ranks; returns what they wrote to standard error.

    Args:
        script: what to run.
        arguments: of the script.
        alone: whether zerofx cannot be imported.
        ranks: how many.
        environment: what to add to it.
    """
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    path = "" if alone else str(ROOT)
    ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **environment}
    done = subprocess.run(
        [sys.executable, *command, str(script), *arguments],
        env={**os.environ, **ours},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stderr
