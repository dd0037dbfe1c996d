"""Checkpoints that are damaged, or another model's, are refused by file and tensor."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from tests.checkpoint.runs import Run
from tests.contract.loops import refused
from tests.models import Mlp
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.checkpoint.writer import alone
from zerofx.errors import CheckpointError


def _data_file(folder: Path) -> Path:
    """The file that holds rank 1's rows."""
    (file,) = folder.glob("__1_*.distcp")
    return file


def _truncate(folder: Path) -> None:
    file = _data_file(folder)
    os.truncate(file, file.stat().st_size - 100)


def _flip_all(folder: Path) -> None:
    _flip(folder, lambda record, _: record[::7])


def _flip_one(folder: Path) -> None:
    """A byte of a tensor, far from the headers that the format itself would miss."""
    _flip(folder, lambda _, values: values[5:6])


def _flip(folder: Path, choose: Callable[[range, range], range]) -> None:
    """Change bytes among those of a record, and of the tensor in it."""
    info = next(
        info
        for index, info in FileSystemReader(folder).read_metadata().storage_data.items()
        if index.fqn == "model.layers.0.weight" and info.relative_path == _data_file(folder).name
    )
    file = _data_file(folder)
    content = bytearray(file.read_bytes())
    record = range(info.offset, info.offset + info.length)
    rows = _rows(content[record.start : record.stop])
    first = content.index(rows, record.start)
    for place in choose(record, range(first, first + len(rows))):
        content[place] ^= 0xFF
    file.write_bytes(content)


def _rows(record: bytes) -> bytes:
    """The memory of the tensor in a record."""
    return torch.load(io.BytesIO(record)).numpy().tobytes()


def _lose_file(folder: Path) -> None:
    _data_file(folder).unlink()


def _lose_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


def _cut_metadata(folder: Path) -> None:
    os.truncate(folder / ".metadata", 100)


DAMAGE: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (_truncate, ("truncated", "__1_", "_0.distcp: ", "latest")),
    (_flip_all, ("could not be read", "__1_", "_0.distcp: model.layers.0.weight", "latest")),
    (_flip_one, ("could not be read", "__1_", "_0.distcp: model.layers.0.weight", "checksum")),
    (_lose_file, ("missing", "__1_", "_0.distcp: model.layers.0.weight")),
    (_lose_metadata, ("no complete checkpoint", ".metadata")),
    (_cut_metadata, (".metadata is damaged", "latest")),
]


def _damaged(folder: Path) -> None:
    run = Run(3, build=Mlp, min_shard_numel=0)
    run.train(range(2))
    checkpoint.save(folder / "good", run.model, run.optimizer)
    wanted = run.state()
    again = Run(3, seed=1, build=Mlp, min_shard_numel=0)
    for number, (damage, words) in enumerate(DAMAGE):
        bad = folder / f"bad{number}"
        if dist.get_rank() == 0:
            shutil.copytree(folder / "good", bad)
            damage(bad)
        dist.barrier()
        again.train(range(2))
        before = again.state()
        with refused(str(bad), *words, kind=CheckpointError):
            checkpoint.load(bad, again.model, again.optimizer)
        if damage not in (_flip_all, _flip_one):
            assert all(torch.equal(value, before[key]) for key, value in again.state().items())
        assert again.optimizer.state, "the optimizer keeps its state"
        checkpoint.load(folder / "good", again.model, again.optimizer)
        assert all(torch.equal(value, wanted[key]) for key, value in again.state().items())


def test_damaged_files(tmp_path: Path) -> None:
    run_ranks(2, _damaged, tmp_path, timeout=200)


def _mismatched(folder: Path) -> None:
    run = Run(3, build=Mlp)
    run.train([0])
    checkpoint.save(folder / "a", run.model, run.optimizer)
    checkpoint.save(folder / "model", run.model)
    other: Any = Mlp()
    other.layers[0], other.layers[2] = nn.Linear(7, 12), nn.Linear(12, 11)
    with refused("layers.0.weight: [13, 7] in the checkpoint, [12, 7] here", kind=CheckpointError):
        checkpoint.load(folder / "a", other)
    other.layers.append(nn.Linear(5, 5))
    with refused("model.layers.5.weight is not in the checkpoint", kind=CheckpointError):
        checkpoint.load(folder / "a", other)
    other = Mlp()
    del other.layers[4]
    with refused("model.layers.4.weight is only in the checkpoint", kind=CheckpointError):
        checkpoint.load(folder / "a", other)
    with refused("saved without an optimizer", "the model alone", kind=CheckpointError):
        checkpoint.load(folder / "model", run.model, run.optimizer)
    with refused("does not exist", kind=CheckpointError):
        checkpoint.load(folder / "nothing", run.model)
    with refused(".metadata is a file", "torch.load", kind=CheckpointError):
        checkpoint.load(folder / "a" / ".metadata", run.model)
    frozen = run.model.layers[0].weight.requires_grad_(False)
    del run.optimizer.state[frozen]
    checkpoint.load(folder / "a", run.model, run.optimizer)  # it fits: the weight may train again
    assert run.optimizer.state[frozen]["step"] == 1


def test_checkpoints_of_another_model(tmp_path: Path) -> None:
    run_ranks(2, _mismatched, tmp_path)


def test_checkpoints_with_other_keys(tmp_path: Path) -> None:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters())
    with alone():
        for name, key in (("bare", "net"), ("half", "model")):
            state = {key: model.state_dict(), "optim": optimizer.state_dict()}
            dcp.save(state, checkpoint_id=tmp_path / name)
    with refused("bare has no model, but", "- net", "- optim", kind=CheckpointError):
        checkpoint.load(tmp_path / "bare", model)
    with refused("half has no optimizer, but", "- model", "- optim", kind=CheckpointError):
        checkpoint.load(tmp_path / "half", model, optimizer)
    checkpoint.load(tmp_path / "half", model)


def _unwritable(folder: Path) -> None:
    run = Run(3, build=Mlp)
    run.train([0])
    (folder / "file").touch()
    with refused("could not be written", "room", kind=CheckpointError):
        checkpoint.save(folder / "file" / "a", run.model)
    saving = checkpoint.async_save(folder / "file" / "a", run.model)
    with refused("could not be written", kind=CheckpointError):
        saving.wait()
    for node_local in (False, True):
        with refused("could not be written", "`extra`", "no functions", kind=CheckpointError):
            checkpoint.save(folder / "a", run.model, None, lambda: 0, node_local=node_local)
    with refused("could not be written", "`extra`", "no functions", kind=CheckpointError):
        checkpoint.async_save(folder / "a", run.model, None, (each for each in "ab"))


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    run_ranks(2, _unwritable, tmp_path)


@pytest.mark.parametrize("name", ["b", "a"])
def test_latest_is_the_one_completed_last(tmp_path: Path, name: str) -> None:
    assert checkpoint.latest(tmp_path) is None
    other = {"a": "b", "b": "a"}[name]
    for number, each in enumerate([other, name, ".c.partial", "d"]):
        (tmp_path / each).mkdir()
        if each != "d":
            (tmp_path / each / ".metadata").touch()
            os.utime(tmp_path / each / ".metadata", (number, number))
    assert checkpoint.latest(tmp_path) == tmp_path / name
