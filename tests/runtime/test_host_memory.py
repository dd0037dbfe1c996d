"""Steady steps take the memory that the steps before let go of, and no new pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.scripts import run_script

_SCRIPT = """
import resource, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
layers = [torch.nn.PReLU(512) for _ in range(8)]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"inner": "eager", "keep_freed_memory": sys.argv[1] == "yes"}
step = torch.compile(model, backend="zero3", options=options)
faults = []
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(torch.randn(8192, 512)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[-5:]))
dist.destroy_process_group()
"""
"""A step lets go of 150 MB, forty thousand pages; this prints how many of five steps are new."""


@pytest.mark.skipif(sys.platform != "linux", reason="no glibc")
def test_steady_steps_take_few_new_pages(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    kept, given_back = (
        [int(n) for n in run_script(script, each).split()] for each in ("yes", "no")
    )
    assert 2 * max(kept) < min(given_back)
