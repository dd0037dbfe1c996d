"""The examples run, under torchrun and alone, and leave behind what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(out: Path, *arguments: str, torchrun: bool = False) -> str:
    """Run an example that trains on text and return what it printed."""
    place = ("--tiny", "--out", str(out), "--cache", str(out / "cache"))
    return run_example(*arguments, *place, torchrun=torchrun)


def run_example(script: str, *options: str, torchrun: bool = False) -> str:
    """Run an example on two ranks and return what it printed."""
    options = (*options, "--inner", "eager")
    if not torchrun:
        return run_script(EXAMPLES / script, *options, timeout=200)
    return run_command(*TORCHRUN, str(EXAMPLES / script), *options)


def run_command(*arguments: str) -> str:
    """Run Python and return what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("stage", ["3", "1"])
def test_finetune_trains_saves_and_resumes(tmp_path: Path, stage: str) -> None:
    common = ("finetune_smollm2.py", "--stage", stage, "--length", "32", "--save-every", "2")
    few = ("--sample-tokens", "2", "--eval-windows", "2")
    run(tmp_path, *common, *few, "--steps", "2", torchrun=stage == "3")
    pictures, checkpoints = list(tmp_path.glob("*.png")), list((tmp_path / "checkpoints").iterdir())
    assert pictures and all(path.stat().st_size > 5_000 for path in pictures)
    assert checkpoints
    printed = run(tmp_path, *common, *few, "--steps", "4", "--resume")
    assert "resuming" in printed
    assert len(list((tmp_path / "checkpoints").iterdir())) > len(checkpoints)


def test_quickstart_needs_no_torchrun(tmp_path: Path) -> None:
    options = ("--tiny", "--out", str(tmp_path), "--cache", str(tmp_path / "cache"))
    few = ("--steps", "3", "--sample-characters", "4", "--inner", "eager")
    printed = run_command(str(EXAMPLES / "quickstart.py"), *options, *few)
    assert "loss" in printed


def test_trainer_trains_and_saves(tmp_path: Path) -> None:
    few = ("--length", "32", "--eval-windows", "3", "--save-every", "2", "--steps", "2")
    printed = run(tmp_path, "trainer_smollm2.py", *few)
    assert "eval_loss" in printed and "eval_accuracy" in printed
    assert (tmp_path / "checkpoint-2" / "zerofx").is_dir()
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_own_passes_change_what_moves_and_no_number() -> None:
    lines = run_example("own_pass.py", "--steps", "2").splitlines()
    losses = [line.split()[1:3] for line in lines if line.startswith("losses")]
    assert len(losses) == 2 and losses[0] == losses[1]
    assert any(line.endswith("with own passes") for line in lines)


def test_a_deepspeed_file_drives_a_loop(tmp_path: Path) -> None:
    options = ("--steps", "20", "--width", "64", "--out", str(tmp_path / "saved"))
    printed = run_example("from_ds_config.py", *options)
    assert "zero_optimization.contiguous_gradients" in printed and "batch: 32 = 8" in printed
    first, last = (float(found) for found in re.findall(r"^step \d+: loss (\S+)", printed, re.M))
    assert last < first - 0.5
    assert len(re.findall(r"^step=[12]0, skipped=0, lr=\[", printed, re.M)) == 2
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in saved.values())


def test_muon_learns_and_owners_share_its_state() -> None:
    options = ("--steps", "20", "--width", "64", "--depth", "1")
    printed = run_example("muon.py", *options)
    first, last = (float(found) for found in re.findall(r"^step \d+: loss (\S+)", printed, re.M))
    assert last < first - 0.5
    assert re.findall(r"^rank (\d) owns 2 matrices", printed, re.M) == ["0", "1"]
