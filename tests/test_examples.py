"""The examples run, on two ranks and alone, and leave behind what they promise."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.scripts import run_script

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(script: str, *options: str) -> str:
    """Run an example on two ranks and return what it printed."""
    return run_script(EXAMPLES / script, *options, "--inner", "eager", timeout=200)


def run_alone(script: str, *options: str) -> str:
    """Run an example without torchrun and return what it printed."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *options, "--inner", "eager"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def in_folder(out: Path) -> tuple[str, ...]:
    """Options of examples that train on text."""
    return "--tiny", "--out", str(out), "--cache", str(out / "cache")


def test_finetune_trains_saves_and_resumes_at_another_stage(tmp_path: Path) -> None:
    few = ("--length", "32", "--sample-tokens", "2", "--eval-windows", "2")
    common = (*few, "--save-every", "2", *in_folder(tmp_path))
    run_example("finetune_smollm2.py", *common, "--steps", "2")
    pictures, checkpoints = list(tmp_path.glob("*.png")), list((tmp_path / "checkpoints").iterdir())
    assert pictures and all(path.stat().st_size > 5_000 for path in pictures)
    assert checkpoints
    again = ("--stage", "1", "--steps", "4", "--resume")
    printed = run_example("finetune_smollm2.py", *common, *again)
    assert "resuming" in printed
    assert len(list((tmp_path / "checkpoints").iterdir())) > len(checkpoints)


def test_what_examples_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("finetune_smollm2", "trainer_smollm2", "kit.corpus", "kit.display")
    finetune, trainer, corpus, display = map(importlib.import_module, names)
    for example in (finetune, trainer):
        with pytest.raises(SystemExit, match="there is no checkpoint in"):
            example.main(["--tiny", "--resume", "--out", str(tmp_path / "wrong")])
    with pytest.raises(SystemExit):
        finetune.parse_arguments(["--batch", "0"])
    with pytest.raises(SystemExit, match="give a smaller --length"):
        corpus.Windows(torch.arange(9), length=9, batch=1, rank=0, world=1, seed=0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = display.draw_losses(tmp_path / "loss.png", [1.0], 1.0, 0.5, "a title")
    assert "matplotlib is not installed" in said and not list(tmp_path.iterdir())


def test_downloads_are_checked_before_pip_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assets = importlib.import_module("kit.assets")
    archive, marker = tmp_path / "wrong-1.0.tar.gz", tmp_path / "it ran"
    with tarfile.open(archive, "w:gz") as file:
        (tmp_path / "setup.py").write_text(f"open({str(marker)!r}, 'w')")
        file.add(tmp_path / "setup.py", "wrong-1.0/setup.py")
    with pytest.raises(SystemExit, match="HASHES"):
        assets.fetch(assets.Asset(str(archive), archive.name, "0" * 64), tmp_path / "cache")
    assert not marker.exists() and not list((tmp_path / "cache" / "downloads").iterdir())


def test_of_two_that_fill_a_cache_both_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    assets = importlib.import_module("kit.assets")
    with assets.staged(tmp_path / "model") as mine, assets.staged(tmp_path / "model") as theirs:
        for each in (mine, theirs):
            each.mkdir()
            (each / "weights").touch()
    assert [each.name for each in tmp_path.rglob("*")] == ["model", "weights"]


def test_the_program_of_the_readme_learns(tmp_path: Path) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    (program,) = re.findall(r"(?ms)^```python\n(# train\.py\n.*?)^```$", readme)
    script = tmp_path / "train.py"
    line = "    loss.backward()\n"
    script.write_text(program.replace(line, f"    print(loss.item())\n{line}"))
    losses = list(map(float, run_script(script).split()))
    assert len(losses) == 2 * 100
    for mine in (losses[:100], losses[100:]):
        assert sum(mine[-10:]) < 0.1 * sum(mine[:10])


def test_quickstart_needs_no_torchrun(tmp_path: Path) -> None:
    few = ("--steps", "3", "--sample-characters", "4")
    assert "loss" in run_alone("quickstart.py", *in_folder(tmp_path), *few)


def test_trainer_trains_and_saves(tmp_path: Path) -> None:
    few = ("--length", "32", "--eval-windows", "3", "--save-every", "2", "--steps", "2")
    printed = run_example("trainer_smollm2.py", *few, *in_folder(tmp_path))
    assert "eval_loss" in printed and "eval_accuracy" in printed
    assert (tmp_path / "checkpoint-2" / "zerofx").is_dir()
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_own_passes_change_what_moves_and_no_number() -> None:
    lines = run_example("own_pass.py", "--steps", "2").splitlines()
    losses = [line.split()[1:3] for line in lines if line.startswith("losses")]
    assert len(losses) == 2 and losses[0] == losses[1]
    assert lines[-1].endswith("with own passes")


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
