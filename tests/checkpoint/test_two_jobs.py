"""Two jobs that save to one name at a time: one of them is told, and nothing is mixed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from zerofx import checkpoint
from zerofx.checkpoint import nodes
from zerofx.checkpoint.writer import AtomicWriter
from zerofx.errors import CheckpointError


def _filled(value: float) -> nn.Linear:
    model = nn.Linear(4, 8)
    torch.nn.init.constant_(model.weight, value)
    return model


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # in threads
@pytest.mark.parametrize("node_local", [False, True])
@pytest.mark.parametrize("order", ["wb wa fa fb", "wb wa fb fa"])
def test_the_one_that_began_last_is_saved(tmp_path: Path, order: str, node_local: bool) -> None:
    """`a` begins first; then they write and finish in that order."""
    path, turns = tmp_path / "last", order.split()
    done = {turn: threading.Event() for turn in ("ba", *turns)}
    write = FileSystemWriter.write_data
    place, last = (nodes, "refuse_taken") if node_local else (AtomicWriter, "finish")
    finish = getattr(place, last)
    said: list[str] = []

    def in_turn(kind: str, call: Any, *args: Any, **named: Any) -> Any:
        turn = kind + threading.current_thread().name
        if turn == "wa":
            done["ba"].set()
        for before in turns[: turns.index(turn)]:
            assert done[before].wait(60)
        try:
            return call(*args, **named)
        finally:
            done[turn].set()

    def job(value: float) -> None:
        if value == 2.0:
            assert done["ba"].wait(60)
        try:
            checkpoint.save(path, _filled(value), extra=value, node_local=node_local)
        except CheckpointError as error:
            said.append(str(error))

    with (
        patch.object(FileSystemWriter, "write_data", lambda *args: in_turn("w", write, *args)),
        patch.object(place, last, lambda *args, **named: in_turn("f", finish, *args, **named)),
    ):
        jobs = [
            threading.Thread(target=job, args=(v,), name=n) for v, n in ((1.0, "a"), (2.0, "b"))
        ]
        for each in jobs:
            each.start()
        for each in jobs:
            each.join()
    assert len(said) == 1 and "another process began to save to" in said[0], said
    model = _filled(0.0)
    assert checkpoint.load(path, model, node_local=node_local) == 2.0
    assert (model.weight == 2.0).all()
