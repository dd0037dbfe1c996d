"""Saves that meet, are interrupted or fail; and checkpoints that are not the same on all ranks."""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

import zerofx
from tests.checkpoint.runs import Run
from tests.logs import heard
from tests.models import Mlp
from tests.ranks import run_ranks
from zerofx import checkpoint
from zerofx.errors import CheckpointError
from zerofx.runtime.members import gloo_group


def _filled(value: float) -> nn.Linear:
    model = nn.Linear(4, 8)
    nn.init.constant_(model.weight, value)
    zerofx.shard(model, zerofx.ZeroConfig(stage=3, min_shard_numel=0))
    return model


def _value(model: nn.Module) -> list[float]:
    (weight,) = (p for name, p in model.named_parameters() if name == "weight")
    return torch.unique(weight.full_tensor()).tolist()  # type: ignore[attr-defined]


@contextmanager
def _slow_threads(seconds: float) -> Iterator[None]:
    """Writing takes its time, unless the main thread does it."""
    write = FileSystemWriter.write_data

    def slow(self: Any, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(seconds)
        return write(self, *args)

    with patch.object(FileSystemWriter, "write_data", slow):
        yield


def _to_the_same_name(folder: Path) -> None:
    model = _filled(1.0)
    with _slow_threads(1.0):
        saving = checkpoint.async_save(folder / "last", model, extra=1)
        nn.init.constant_(model.weight, 2.0)
        checkpoint.save(folder / "last", model, extra=2)
        saving.wait()
    dist.barrier()
    again = _filled(0.0)
    assert checkpoint.load(folder / "last", again) == 2 and _value(again) == [2.0]
    assert [path.name for path in folder.iterdir()] == ["last"]


def test_a_save_waits_for_one_of_the_same_name(tmp_path: Path) -> None:
    run_ranks(2, _to_the_same_name, tmp_path)


class _Stop(Exception):
    pass


def _interrupted(folder: Path) -> None:
    def stop(*_: Any) -> None:
        raise _Stop

    before = signal.signal(signal.SIGALRM, stop)
    with _slow_threads(2.0):
        saving = checkpoint.async_save(folder / "a", _filled(1.0), extra=1)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(_Stop):
            saving.wait()
        saving.wait()
    signal.signal(signal.SIGALRM, before)
    assert checkpoint.load(folder / "a", _filled(0.0)) == 1


def test_a_signal_ends_the_waiting_and_not_the_save(tmp_path: Path) -> None:
    run_ranks(2, _interrupted, tmp_path)


def _fails(folder: Path) -> list[str]:
    with (
        patch.object(FileSystemWriter, "write_data", side_effect=OSError("disk full")),
        heard("zerofx.checkpoint.saving", logging.ERROR) as said,
    ):
        saving = checkpoint.async_save(folder / "a", _filled(1.0))
        with pytest.raises(CheckpointError):
            saving.wait()
    return said


def test_a_failure_is_logged(tmp_path: Path) -> None:
    for said in run_ranks(2, _fails, tmp_path):
        assert len(said) == 1 and "disk full" in said[0]


def _of_two(folder: Path) -> str:
    for number in (1, 2):
        checkpoint.save(folder / f"step{number}", _filled(number))
    model = _filled(0.0)
    with pytest.raises(CheckpointError, match="different checkpoints") as caught:
        checkpoint.load(folder / f"step{1 + dist.get_rank()}", model)
    assert _value(model) == [0.0]
    return str(caught.value)


def test_ranks_that_find_different_checkpoints(tmp_path: Path) -> None:
    for said in run_ranks(2, _of_two, tmp_path):
        assert "rank 0: step1" in said and "rank 1: step2" in said


def _without_memory(folder: Path) -> None:
    checkpoint.save(folder / "a", _filled(1.0))
    with zerofx.meta_init():
        model = nn.Linear(4, 8)
    with pytest.raises(CheckpointError, match="have no memory") as caught:
        checkpoint.load(folder / "a", model)
    assert caught.value.offenders == ("weight", "bias")


def test_a_model_without_memory(tmp_path: Path) -> None:
    run_ranks(2, _without_memory, tmp_path)


@pytest.mark.parametrize(
    ("index", "said"),
    [("{", "damaged"), ("{}", "damaged"), ({"weight": "../b/w.safetensors"}, "other folders")],
)
def test_an_index_that_is_damaged(tmp_path: Path, index: Any, said: str) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        save_file({"weight": torch.ones(8, 4)}, tmp_path / name / "w.safetensors")
    text = index if isinstance(index, str) else json.dumps({"weight_map": index})
    (tmp_path / "a" / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=said):
        zerofx.load_safetensors(nn.Linear(4, 8, bias=False), tmp_path / "a")


def _again_and_again(folder: Path) -> int:
    """How many groups saves in threads make."""
    run = Run(3, build=Mlp)
    run.train(range(1))
    with patch("zerofx.checkpoint.ranks.gloo_group", wraps=gloo_group) as made:
        for number in range(3):
            checkpoint.async_save(folder / str(number), run.step, run.optimizer).wait()
        first, second = (
            checkpoint.async_save(folder / name, run.step, run.optimizer) for name in "ab"
        )
        first.wait(), second.wait()
    return made.call_count


def test_saves_one_after_another_share_a_group(tmp_path: Path) -> None:
    assert max(run_ranks(2, _again_and_again, tmp_path, timeout=120)) in (1, 2)


class _Single:
    def __reduce__(self) -> str:
        raise ValueError("there is one of me")


def _not_copied(folder: Path) -> None:
    run = Run(3, build=Mlp)
    run.train(range(1))
    with pytest.raises(CheckpointError, match="there is one of me"):
        checkpoint.async_save(folder / "a", run.step, run.optimizer, _Single())
    checkpoint.async_save(folder / "a", run.step, run.optimizer, "notes").wait()


def test_an_extra_that_cannot_be_copied(tmp_path: Path) -> None:
    run_ranks(2, _not_copied, tmp_path)
