"""Checkpoints on disks of nodes: four ranks on two, each with a folder that only its ranks see."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerofx
from tests.checkpoint.runs import Run, bitwise, sharded_by
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError


def _node(folder: Path, per_node: int = 2) -> Path:
    return folder / f"node{dist.get_rank() // per_node}"


class _Net(nn.Module):
    """Rows, a parameter too small to be sharded, one of no dimensions, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(7, 13), nn.BatchNorm1d(13)
        self.last = nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.norm(self.first(x))) * self.scale, y)


def _resumed(folder: Path) -> None:
    here = _node(folder)
    _see_nothing_of(folder / f"node{1 - dist.get_rank() // 2}")
    for stage, in_background, options in CASES:
        run = Run(stage, build=_Net, **options)
        train = run.train if stage in COMPILED else functools.partial(_only_update, run)
        train(range(2))
        there, extra = here / "ck", {"rank": dist.get_rank()}
        saving = None
        if in_background:
            saving = checkpoint.async_save(there, run.model, run.optimizer, extra, node_local=True)
        else:
            checkpoint.save(there, run.model, run.optimizer, extra, node_local=True)
        losses = train(range(2, 4))
        if saving is not None:
            saving.wait()
        assert [path.name for path in here.iterdir()] == ["ck"]
        wanted = run.state()
        assert checkpoint.latest(here, node_local=True) == there
        extra = checkpoint.load(there, run.model, run.optimizer, node_local=True)
        assert extra == {"rank": 0}
        assert train(range(2, 4)) == losses
        bitwise(run.state(), wanted)


CASES: list[tuple[int, bool, dict[str, Any]]] = [
    (0, False, {}),
    (1, True, {}),
    (2, False, {}),
    (3, False, {}),
    (3, True, {"replicate": 2}),
]
COMPILED = (1, 3)
"""At the others only the optimizer steps: programs change nothing of what is saved there."""


def _only_update(run: Run, steps: range) -> None:
    zerofx.shard(run.model, sharded_by(run.stage))
    for _ in steps:
        run.only_update()


def _see_nothing_of(folder: Path) -> None:
    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir", "os.mkdir", "os.rename"):
            assert not str(arguments[0]).startswith(f"{folder}{os.sep}"), (event, arguments)

    sys.addaudithook(watch)


def test_each_node_goes_on_from_its_own_disk(tmp_path: Path) -> None:
    run_ranks(4, _resumed, tmp_path, timeout=200)


def _sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(3, 8)
    zerofx.shard(model, zerofx.ZeroConfig(stage=3, min_shard_numel=9, **options))
    return model


def _put_together(folder: Path) -> None:
    here, model = _node(folder), _sharded()
    checkpoint.save(here / "ck", model, extra="both", node_local=True)
    for told in (False, True):
        with refused("rows in", "are not on this node", ".distcp: model.weight", "into one"):
            checkpoint.load(here / "ck", nn.Linear(3, 8), node_local=told)
    with refused("rows in", "are not on this node", ".distcp: model.weight", "into one"):
        checkpoint.open_source(here / "ck")
    dist.barrier()
    if dist.get_rank() == 0:
        for node in (0, 1):
            shutil.copytree(folder / f"node{node}" / "ck", folder / "all", dirs_exist_ok=True)
    dist.barrier()
    wanted = Run.values(model)
    for other in (nn.Linear(3, 8), _sharded(replicate=4)):
        assert checkpoint.load(folder / "all", other) == "both"
        bitwise(Run.values(other), wanted)
    read = checkpoint.open_source(folder / "all").tensors("model.")
    assert torch.equal(read["weight"].read(), wanted["weight"])


def test_the_folders_of_all_nodes_make_an_ordinary_checkpoint(tmp_path: Path) -> None:
    run_ranks(4, _put_together, tmp_path)


_doomed: list[Path] = []


def _fail_to_rename(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "os.rename" and Path(str(arguments[1])) in _doomed:
        raise OSError("killed")


def _killed_between_renames(folder: Path) -> None:
    here, model = _node(folder), _sharded()
    sys.addaudithook(_fail_to_rename)
    for number, doomed in enumerate([None, "node1", "node0", "node1", None]):
        _doomed[:] = [folder / str(doomed) / "ck"]
        with contextlib.nullcontext() if doomed is None else pytest.raises(CheckpointError):
            checkpoint.save(here / "ck", model, extra=number, node_local=True)
        found = checkpoint.latest(here, node_local=True)
        assert found is not None
        for path in (found, here / "ck"):
            whole = 0 if doomed else number
            assert checkpoint.load(path, model, node_local=True) == whole
    assert [path.name for path in here.iterdir()] == ["ck"], "nothing is left behind"


def test_a_kill_between_the_renames_of_two_nodes_costs_nothing(tmp_path: Path) -> None:
    run_ranks(4, _killed_between_renames, tmp_path)


def _incomplete(folder: Path) -> None:
    here, model = _node(folder), _sharded()
    assert checkpoint.latest(here, node_local=True) is None
    for step in (1, 2):
        checkpoint.save(here / f"step{step}", model, node_local=True)
    dist.barrier()
    if dist.get_rank() == 2:
        shutil.rmtree(here / "step2")
    dist.barrier()
    assert checkpoint.latest(here, node_local=True) == here / "step1"
    with refused("step2", "rank 2: none", "latest(folder, node_local=True)"):
        checkpoint.load(here / "step2", model, node_local=True)
    other = folder / f"node{1 - dist.get_rank() // 2}"
    dist.barrier()
    with refused("rank 0: rows in", "are not on this node", ".distcp: model.weight"):
        checkpoint.load(other / "step1", model, node_local=True)
    if dist.get_rank() == 3:
        next(here.glob("step1/__3_*")).write_bytes(b"")
    dist.barrier()
    with refused("rank 2: ", "truncated", "__3_", "_0.distcp: model.bias"):
        checkpoint.load(here / "step1", model, node_local=True)
    (here / "file").touch()
    with refused("could not be written", kind=CheckpointError):
        checkpoint.save(here / "file" / "a", model, node_local=True)


def test_what_is_not_on_all_nodes(tmp_path: Path) -> None:
    run_ranks(4, _incomplete, tmp_path)


def _in_parts(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    here, part = _node(folder), f"part{mesh.get_local_rank('model')}"
    model = _sharded(mesh=mesh["data"])
    for step in (1, 2):
        checkpoint.save(here / f"step{step}" / part, model, extra=part, node_local=True)
    dist.barrier()
    if dist.get_rank() == 3:
        shutil.rmtree(here / "step2" / part)
    dist.barrier()
    first = here / "step1" / part
    assert checkpoint.latest(here, part, node_local=True) == first
    assert checkpoint.load(first, model, node_local=True) == part


def test_models_in_parts(tmp_path: Path) -> None:
    run_ranks(4, _in_parts, tmp_path)


def test_without_ranks(tmp_path: Path) -> None:
    there = tmp_path / "ck"
    checkpoint.save(there, nn.Linear(2, 2), extra=1, node_local=True)
    assert checkpoint.latest(tmp_path, node_local=True) == there
    assert checkpoint.load(there, nn.Linear(2, 2), node_local=True) == 1
