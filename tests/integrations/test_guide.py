"""The scripts of docs/huggingface.md run, each on two ranks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.integrations.loops import fresh_state
from tests.ranks import run_ranks

GUIDE = Path(__file__).parents[2] / "docs" / "huggingface.md"
SCRIPTS = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", GUIDE.read_text(), re.S | re.M))
LEFT_BEHIND = {
    "with_accelerate": ["epoch-0", "epoch-1", "model"],
    "with_trainer": ["checkpoint-2", "checkpoint-4", "model"],
    "with_peft": ["adapters"],
}
HERE = {
    # The ranks of the tests have joined; segments need no compiler to show that a script runs.
    'dist.init_process_group("gloo")': "",
    "ZeroConfig(stage=3)": 'ZeroConfig(stage=3, inner="eager")',
    'backend="zero3"': 'backend="zero3", options={"inner": "eager"}',
}


def execute(script: str, folder: str) -> None:
    pytest.importorskip("accelerate")
    fresh_state()
    os.chdir(folder)
    exec(compile(script, "a script of the guide", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("name", LEFT_BEHIND)
def test_scripts(name: str, tmp_path: Path) -> None:
    for package in ("accelerate", "transformers", "peft"):
        pytest.importorskip(package)
    script = SCRIPTS[name]
    for there, here in HERE.items():
        script = script.replace(there, here)
    run_ranks(2, execute, script, str(tmp_path), timeout=200)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == LEFT_BEHIND[name]
