"""Checkpoints of a model in parts, each on some ranks: a job goes on from what all of them have."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.torch_private import default_store


def _resumed(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    part = f"part{mesh.get_local_rank('model')}"
    model = nn.Linear(4, 4)
    zerofx.shard(model, zerofx.ZeroConfig(stage=3, mesh=mesh["data"]))
    assert checkpoint.latest(folder, part=part) is None
    for step in (1, 2, 3):
        if step < 3 or part == "part0":  # the job is killed while it saves
            checkpoint.save(folder / f"step{step}" / part, model, extra=step)
        dist.barrier()
    found = checkpoint.latest(folder, part=part)
    assert found == folder / "step2" / part
    assert checkpoint.load(found, model) == 2


def test_the_latest_step_is_one_of_all_parts(tmp_path: Path) -> None:
    run_ranks(4, _resumed, tmp_path)


def test_without_ranks(tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step{step}" / "only", nn.Linear(2, 2))
    assert checkpoint.latest(tmp_path, part="only") == tmp_path / "step2" / "only"
    assert checkpoint.latest(tmp_path) is None


def _resumed_and_killed(folder: Path, steps: list[int], last: str) -> None:
    _as_another_job(folder)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    part = f"part{mesh.get_local_rank('model')}"
    model = zerofx.shard(nn.Linear(4, 4), zerofx.ZeroConfig(stage=3, mesh=mesh["data"]))
    for step in steps:
        if step < steps[-1] or part <= last:
            checkpoint.save(folder / f"step{step}" / part, model, extra=step)
        dist.barrier()
    wanted = steps[-1] if last == "part1" else steps[-1] - 1
    found = checkpoint.latest(folder, part=part)
    assert found == folder / f"step{wanted}" / part, (found, wanted)


def _as_another_job(folder: Path) -> None:
    """Tests share processes, and with them the store, of which each job has its own."""
    if dist.get_rank() == 0:
        paths = [folder / f"step{step}" / f"part{part}" for step in range(5) for part in range(2)]
        for key in ("zerofx/checkpoint", *(f"zerofx/checkpoint/saves/{path}" for path in paths)):
            default_store().delete_key(key)
    dist.barrier()


def test_parts_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    for steps, last in ([[1, 2, 3], "part1"], [[3], "part0"], [[3, 4], "part1"], [[2, 3], "part1"]):
        run_ranks(4, _resumed_and_killed, tmp_path, steps, last)


def test_what_is_removed_meanwhile_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        checkpoint.save(tmp_path / f"step{step}" / "only", nn.Linear(2, 2), node_local=True)
        checkpoint.save(tmp_path / f"only{step}", nn.Linear(2, 2))
    ask = Path.is_file

    def prune(path: Path) -> bool:
        """Another process removes old checkpoints right after this one has seen them."""
        there = ask(path)
        if there and path.parent.name in ("only1", "only") and "step2" not in path.parts:
            shutil.rmtree(path.parent)
        return there

    monkeypatch.setattr(Path, "is_file", prune)
    assert checkpoint.latest(tmp_path) == tmp_path / "only2"
    assert not (tmp_path / "only1").exists()
    there = tmp_path / "step2" / "only"
    assert checkpoint.latest(tmp_path, "only", node_local=True) == there
    assert not (tmp_path / "step1" / "only").exists()
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path / "nothing") is None
