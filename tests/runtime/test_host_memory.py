"""Memory that is freed is taken again, and no new pages with it."""

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
options = {"inner": "eager", "keep_freed_memory": sys.argv[1] == "yes"}
step = torch.compile(model, backend="zero3", options=options)
step(torch.randn(8, 512)).square().mean().backward()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    activations = [torch.zeros(8192, 512) for _ in range(24)]
    del activations
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(faults[1:]))
dist.destroy_process_group()
"""
"""Takes 400 MB, a hundred thousand pages, six times; prints how many are new after the first.

Not counted in steps of training: what these leave at the end of the heap is up to chance.
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no glibc")
def test_what_is_freed_is_taken_again_without_new_pages(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    kept, given_back = (
        [int(n) for n in run_script(script, each).split()] for each in ("yes", "no")
    )
    assert 2 * max(kept) < min(given_back)
