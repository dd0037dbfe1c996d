"""Dumps of models that no rank ever ran: real passes on fake tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.gpt import Gpt
from zerofx.config import ZeroConfig
from zerofx.cost.compute import Roofline
from zerofx.cost.link import Link
from zerofx.cost.machine import Machine
from zerofx.frontend.dump import Dump, dump_for
from zerofx.frontend.predict import Setting
from zerofx.frontend.rehearsal import Rehearsal, rehearse_model
from zerofx.passes.base import run_passes
from zerofx.passes.pipelines import pipeline

CPU = Machine("cpu", Roofline(), Link(1e9, 1e-4))


def rehearse(depth: int, width: int = 64) -> Rehearsal:
    """A GPT of `depth` blocks."""
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    return rehearse_model(lambda: Gpt(depth=depth, width=width), lambda: ((tokens,), {}), "eager")


def dump_gpt(
    folder: Path,
    rehearsal: Rehearsal,
    stage: int = 3,
    machine: Machine = CPU,
    ranks: int = 4,
    number: int = 0,
    **options: Any,
) -> Dump:
    """Write the dump of both programs; returns who watched them."""
    config: Any = ZeroConfig(stage=stage, inner="eager", **options)  # type: ignore[arg-type]
    passes = pipeline(config)
    dump = dump_for(str(folder), lambda: number, passes, Setting(machine, ranks, fused=False))
    assert dump is not None
    for program in rehearsal.halves(config, ranks):
        dump.begin(program)
        run_passes(program, passes, observer=dump)
        dump.end(program)
    return dump
