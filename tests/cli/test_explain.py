"""`zerofx explain` of scripts: alone, under torchrun, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts import run_module, run_script
from zerofx.cli.main import main

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "debug" / "trained.py")


def explain(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in processes of its own: scripts make and leave process groups."""
    return run_module("zerofx", "explain", *arguments)


def test_a_script_without_torchrun() -> None:
    done = explain("--world-size", "4", "--link", "1GB/s", "--json", SCRIPT, "5")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)  # what the script prints is not in the way
    assert "between two graphs" in done.stderr
    assert found["stage"] == 3 and found["world_size"] == 4 and found["device"] == "cpu"
    captured = found["captured"]
    assert captured["graphs"] == 4 and captured["training"] == 4
    lines = {each["place"]["code"] for each in captured["breaks"]}
    assert lines == {'print("before any operation")', 'print("between two graphs")'}
    sizes = [each for each in captured["recompiles"] if "expected 4, actual 5" in each["reason"]]
    assert len(sizes) == 2 and all("mark_dynamic" in each["remedy"] for each in sizes)
    # Four steps follow the first; the last one compiles anew.
    assert found["measured"]["num_ranks"] == 1 and found["measured"]["steps"] == 3
    assert found["measured"]["step"] > 0
    assert sum(each["wire_bytes"] for each in found["collectives"]) == found["sent_bytes"] > 0
    assert found["changes_tried"] > 5 and found["changes_untried"]


_ACCUMULATES = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
step = torch.compile(model, backend="zero3", options={"inner": "eager", "min_shard_numel": 0})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    for _ in range(2):
        step(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_step_has_all_of_its_micro_batches(tmp_path: Path) -> None:
    script = tmp_path / "accumulates.py"
    script.write_text(_ACCUMULATES)
    done = explain("--world-size", "4", "--json", str(script))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {each["runs"] for each in found["collectives"]} == {2.0}
    shards = 4 * (64 * 64 + 64) * 3 // 4
    # In each micro-batch two gathers and a reduction, but for what is kept.
    assert found["sent_bytes"] in (2 * 2 * shards, 2 * 3 * shards)


_SEVERAL = """
import sys, torch, torch.distributed as dist, zerofx
from torch import nn
dist.init_process_group("gloo")
lax = {"inner": "eager", "min_shard_numel": 0}
options = {**lax, "memory_budget": 0}

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + self.inner(x).relu()

def models():
    if sys.argv[1] == "blocks":  # one model; its blocks have one class and unlike widths
        blocks = [Block(width) for width in (64, 32, 16)]
        zerofx.shard(nn.ModuleList(blocks), zerofx.ZeroConfig(stage=3, **options))
        for block in blocks:
            block.compile(backend="zero3", options=options, dynamic=False)
        return blocks
    blocks = [Block(64), Block(32)]  # models of their own
    stages = ["zero3", "zero3" if sys.argv[1] == "models" else "zero1"]
    given = [options if stage == "zero3" else lax for stage in stages]
    return [torch.compile(b, backend=s, options=o) for b, s, o in zip(blocks, stages, given)]

runs = models()
optimizers = [torch.optim.SGD(run.parameters(), lr=0.1) for run in runs]
for _ in range(3):
    x, loss = torch.ones(4, 64), 0
    for run in runs:
        x = run(x)
        loss, x = loss + x.sum(), x[:, ::2]
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("what", "widths"), [("blocks", [64, 32, 16]), ("models", [64, 32]), ("stages", [64])]
)
def test_functions_that_models_share_are_counted_apart(
    tmp_path: Path, what: str, widths: list[int]
) -> None:
    script = tmp_path / "several.py"
    script.write_text(_SEVERAL)
    done = explain("--world-size", "4", "--json", str(script), what)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    # Backward gathers no biases, and nothing of the first block, whose input has no gradient.
    shards = [4 * (width * width + width) * 3 // 4 for width in widths]
    weights = [4 * width * width * 3 // 4 for width in widths[1:]]
    assert found["sent_bytes"] == 2 * sum(shards) + sum(weights)
    assert {each["runs"] for each in found["collectives"]} == {1.0}
    assert found["measured"]["steps"] <= 2, "two follow the first, of several optimizers each"
    assert ("zero1" in found["captured"]["left_out"]) is (what == "stages")


_SKIPPED = """
import torch, torch.distributed as dist
from torch import nn

class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 16, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0].square().mean()

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = Recurrent()
    step = torch.compile(model, backend="zero3", options={"inner": "eager", "min_shard_numel": 0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(torch.ones(3, 7, 8)).backward()
    optimizer.step()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("as_target", [False, True])
def test_a_forward_that_dynamo_gives_up_names_line_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_target: bool
) -> None:
    script = tmp_path / "recurrent.py"
    script.write_text(_SKIPPED)
    monkeypatch.chdir(tmp_path)
    target = ["--input", "float32[B,S,8]", "recurrent:Recurrent"]
    done = explain(*target if as_target else [str(script)])
    assert done.returncode != 0
    assert "recurrent.py:11 in forward" in done.stderr and "allow_rnn" in done.stderr
    assert "classes.py" not in done.stderr  # frames of zerofx are not the user's


def test_of_all_ranks_one_prints_of_those_of_its_model() -> None:
    printed = run_script(ROOT / "zerofx" / "__main__.py", "explain", SCRIPT, "3", "2", ranks=3)
    assert printed.count("captured") == 1
    assert printed.startswith("trained.py: zero3 on 2 ranks (cpu)")
    assert "on 1 rank here" not in printed and "measured" in printed


def test_a_rank_that_prints_nothing_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def explained(*args: object, **named: object) -> None:
        raise AssertionError("it took all ranks' cores")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("zerofx.cli.explain.run_script", lambda path, arguments: object())
    monkeypatch.setattr("zerofx.cli.explain.explanation_of", explained)
    monkeypatch.setattr("zerofx.cli.explain.explain_model", explained)
    assert main(["explain", SCRIPT]) == main(["explain", MODEL]) == 0


TARGET = ["explain", "--batch", "2", "--input", "float32[B,64]"]
MODEL = "tests.debug.trained:Net(depth=1)"


def test_a_target_why_and_until(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TARGET, "--why", "unshard.blocks.0", MODEL]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("forward, line ") and "+ fuse_unshards" in printed
    assert main([*TARGET, "--until", "insert_frees", "--json", MODEL]) == 0
    texts = json.loads(capsys.readouterr().out)
    assert "free(full.blocks.0.up.weight" in texts["forward"]


def test_a_check_that_fails_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TARGET, "--memory", "1kB", MODEL]) == 1
    assert "too much for 1.00 kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["none.py"], "none.py does not exist"),
        (["--stage", "2", SCRIPT], "--stage is for a TARGET"),
        (["--why", "a", "--until", "b", SCRIPT], "two questions"),
        ([MODEL, "more"], "put options before it"),
        (["--world-size", "0", MODEL], "--world-size 0 is not allowed"),
        (["no.such.module:Model"], "cannot be imported"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_wrong_usage_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *argv]) == 2
    text = capsys.readouterr().err
    assert text.startswith("zerofx explain: ") and said in text and "Remedy: " in text


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x = 1\n", "trained nothing that a zerofx backend compiled"),
        ("x = 1\nraise KeyError('oh')\n", "failed at {path}:2: KeyError: 'oh'"),
        ("import torch\ntorch.nn.Linear(2, 3)(torch.ones(4))\n", "{path}:2: RuntimeError: "),
        ("import sys\nsys.exit(3)\n", "left with 3"),
        ("x = 1\nx = = 2\n", "failed at {path}:2: SyntaxError: "),
    ],
    ids=["nothing", "raises", "library", "exits", "syntax"],
)
def test_scripts_that_do_not_train(
    body: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    path.write_text(body)
    before = dict(os.environ), list(sys.argv), list(sys.path)
    assert main(["explain", str(path)]) == 1
    assert said.format(path=path) in capsys.readouterr().err
    assert (dict(os.environ), sys.argv, sys.path) == before
