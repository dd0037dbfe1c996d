"""What has the name of a checkpoint or an export already: nothing of others is lost."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerofx
from tests.contract.loops import refused
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.checkpoint import open_source, to_dcp
from zerofx.checkpoint.writer import begin, publish
from zerofx.errors import CheckpointError


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _refused(folder: Path, node_local: bool) -> None:
    model = nn.Linear(2, 2)
    there = {"runs": ("notes.txt", "step-0/"), "file": ("is a file",)}
    for name, words in there.items():
        for save in (checkpoint.save, checkpoint.async_save):
            with refused(str(folder / name), *words, kind=CheckpointError):
                save(folder / name, model, node_local=node_local)
    checkpoint.save(folder / "empty", model, extra=1, node_local=node_local)
    checkpoint.save(folder / "empty", model, extra=2, node_local=node_local)
    assert checkpoint.load(folder / "empty", model, node_local=node_local) == 2


@pytest.mark.parametrize("node_local", [False, True])
def test_a_save_replaces_checkpoints_alone(tmp_path: Path, node_local: bool) -> None:
    checkpoint.save(tmp_path / "runs" / "step-0", nn.Linear(2, 2))
    (tmp_path / "runs" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "empty").mkdir()
    before = _tree(tmp_path)
    run_ranks(2, _refused, tmp_path, node_local)
    new = {each for each in _tree(tmp_path) - before if not each.startswith("empty/")}
    assert before <= _tree(tmp_path) and not new, new
    source = dataclasses.replace(open_source(tmp_path / "empty"), format="safetensors")
    with pytest.raises(CheckpointError, match=r"runs holds more than a checkpoint"):
        to_dcp(source, tmp_path / "runs", lambda _: None)


def test_what_comes_during_an_async_save_stays(tmp_path: Path) -> None:
    partial = begin(tmp_path / "a")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "tokenizer.json").touch()
    with pytest.raises(CheckpointError, match="holds more than a checkpoint"):
        publish(partial, tmp_path / "a")
    assert (tmp_path / "a" / "tokenizer.json").exists()


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "disk" / "last")
    for step in (1, 2):
        checkpoint.save(tmp_path / "last", nn.Linear(2, 2), extra=step)
        assert checkpoint.load(tmp_path / "last", nn.Linear(2, 2)) == step
        assert (tmp_path / "last").is_symlink()
    checkpoint.save(tmp_path / "last", nn.Linear(2, 2), extra=3, node_local=True)
    assert checkpoint.load(tmp_path / "last", nn.Linear(2, 2), node_local=True) == 3
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "last"}
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["last"]


def _exported(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    for size in (40, 10**9, 60, 40):
        checkpoint.export_safetensors(model, folder, max_shard_bytes=size)
        dist.barrier()
        names = {path.name for path in folder.iterdir()} - {"tokenizer.json", "more"}
        if size == 10**9:
            assert names == {"model.safetensors"}
        else:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            files = set(index["weight_map"].values())
            assert names == {"model.safetensors.index.json", *files}
        dist.barrier()


def test_an_export_keeps_other_files(tmp_path: Path) -> None:
    (tmp_path / "out" / "more").mkdir(parents=True)
    (tmp_path / "out" / "tokenizer.json").write_text("mine")
    run_ranks(2, _exported, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "mine"
    assert (tmp_path / "out" / "more").is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(CheckpointError, match="is a file"):
        checkpoint.export_safetensors(nn.Linear(2, 2), tmp_path / "out" / "tokenizer.json")


def test_an_export_that_is_killed_leaves_no_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    checkpoint.export_safetensors(model, tmp_path, max_shard_bytes=40)
    moved = Path.replace

    def killed(source: Path, target: Path) -> Path:
        if "00002" in target.name:
            raise OSError("killed")
        return moved(source, target)

    monkeypatch.setattr(Path, "replace", killed)
    with torch.no_grad():
        next(model.parameters()).fill_(1)
    with pytest.raises(CheckpointError, match="killed"):
        checkpoint.export_safetensors(model, tmp_path, max_shard_bytes=40)
    with pytest.raises(CheckpointError, match=r"holds neither"):
        open_source(tmp_path)
    monkeypatch.undo()
    checkpoint.export_safetensors(model, tmp_path, max_shard_bytes=40)
    assert (open_source(tmp_path).tensors("model.")["0.weight"].read() == 1).all()


def test_a_folder_of_checkpoints_is_none_itself(tmp_path: Path) -> None:
    for name in ("step-1", "step-2"):
        checkpoint.save(tmp_path / name, nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="is a folder of checkpoints") as raised:
        open_source(tmp_path)
    assert raised.value.offenders == ("step-1", "step-2")


@pytest.mark.parametrize("url", ["s3://bucket/x", Path("gs://bucket/x"), "file:///tmp/x"])
def test_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: Any) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    source = dataclasses.replace(_saved(tmp_path / "a", model), format="safetensors")
    calls: list[Callable[[], Any]] = [
        lambda: checkpoint.save(url, model),
        lambda: checkpoint.save(url, model, node_local=True),
        lambda: checkpoint.async_save(url, model),
        lambda: checkpoint.load(url, model),
        lambda: checkpoint.load(url, model, node_local=True),
        lambda: checkpoint.latest(url),
        lambda: checkpoint.latest(url, "part"),
        lambda: checkpoint.export_safetensors(model, url),
        lambda: zerofx.load_safetensors(model, url),
        lambda: checkpoint.AtomicWriter(url),
        lambda: open_source(url),
        lambda: to_dcp(source, url, lambda _: None),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match="is a URL") as refusal:
            call()
        assert "mount it" in refusal.value.remedy
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def _saved(path: Path, model: nn.Module) -> checkpoint.Source:
    checkpoint.save(path, model)
    return open_source(path)
