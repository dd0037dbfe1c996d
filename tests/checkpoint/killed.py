"""Saves that are killed at each of their file operations in turn; see `test_killed.py`.

    python killed.py FOLDER

Prints at how many points the save was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from zerofx import checkpoint


def main(folder: Path) -> None:
    """Kill a save at its first file operation, then at its second, until one comes through."""
    warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
    model, optimizer = _pair(1)
    path = folder / "last"
    checkpoint.save(path, model, optimizer, 1)
    points = 0
    while True:
        child = os.fork()
        if child == 0:
            _save_and_die(path, points, folder)
        _, status = os.waitpid(child, 0)
        found = checkpoint.latest(folder)
        assert found is not None, f"point {points}: the last good one is lost"
        for place in (found, path):
            model, optimizer = _pair(0)
            value = checkpoint.load(place, model, optimizer)
            assert value in (1, 2), value
            _check(model, optimizer, value)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and value == 2, (status, value)
            break
        points += 1
        model, optimizer = _pair(1)
        checkpoint.save(path, model, optimizer, 1)
    print(points)


def _save_and_die(path: Path, points: int, folder: Path) -> None:
    model, optimizer = _pair(2)
    left = points

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        known = event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
        if known and str(folder) in str(arguments[0]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)
    checkpoint.save(path, model, optimizer, 2)
    os._exit(0)


def _pair(value: int) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = AdamW(model.parameters())
    for param in model.parameters():
        param.data.fill_(value)
        optimizer.state[param] = {
            "step": torch.tensor(float(value)),
            "exp_avg": torch.full_like(param, value),
            "exp_avg_sq": torch.full_like(param, value),
        }
    return model, optimizer


def _check(model: nn.Module, optimizer: Optimizer, value: int) -> None:
    for param in model.parameters():
        tensors = [param.detach(), *optimizer.state[param].values()]
        assert all((tensor == value).all() for tensor in tensors), (value, tensors)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
