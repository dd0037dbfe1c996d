"""SIGTERM: processes end at once, whatever they do, and no checkpoint is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faults.dying import OPTIONS, WIDTH, Layers
from tests.ranks import run_ranks
from zerofx import checkpoint

ROOT = Path(__file__).parents[2]


def test_in_the_middle_of_steps_and_saves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.faults.terminated", str(tmp_path)]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [tmp_path / f"log{rank}" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as errors:
            arguments = [*command, str(rank), "2"]
            ranks.append(subprocess.Popen(arguments, cwd=ROOT, env=env, stderr=errors))
    try:
        while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
            assert all(rank.poll() is None for rank in ranks), [log.read_text() for log in logs]
            time.sleep(0.05)
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        codes = [rank.wait(60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [128 + signal.SIGTERM] * 2, [log.read_text() for log in logs]
    last = checkpoint.latest(tmp_path / "saves")
    assert last is not None
    model = Layers()
    checkpoint.load(last, model, torch.optim.AdamW(model.parameters()))


def _saves_at_the_end_of_a_step(folder: str) -> list[float]:
    """As docs/checkpoints.md says: the handler notes, and ranks agree after a step."""
    told = False

    def note(*_: Any) -> None:
        nonlocal told
        told = True

    signal.signal(signal.SIGTERM, note)
    torch.manual_seed(0)
    model = Layers()
    step: Any = torch.compile(model, backend="zero3", options=OPTIONS)
    optimizer = torch.optim.AdamW(model.parameters())
    if dist.get_rank() == 1:  # as a scheduler may: one rank alone, at any time
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        loss = step(torch.ones(4, WIDTH))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        stop = torch.tensor(float(told))
        dist.all_reduce(stop)
        if stop:
            checkpoint.save(folder, model, optimizer)
            return [loss.item(), step(torch.ones(4, WIDTH)).item()]


def test_a_handler_lets_the_run_save_and_exit(tmp_path: Path) -> None:
    first, second = run_ranks(2, _saves_at_the_end_of_a_step, str(tmp_path / "last"))
    assert first == second
    model = Layers()
    checkpoint.load(tmp_path / "last", model, torch.optim.AdamW(model.parameters()))
    assert abs(model(torch.ones(4, WIDTH)).item() - first[1]) < 1e-6
