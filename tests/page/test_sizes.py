"""Predictions take symbolic sizes as they were, and leave the program open for all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.hard.pair import EAGER, draw
from tests.ranks import run_ranks


def _train(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    options = {**EAGER, "dump": folder}
    run: Any = torch.compile(model, backend="zero3", options=options, dynamic=True)
    for size in (3, 5, 8):
        run(draw(size, 4)).sum().backward()


def test_predictions_do_not_guard_on_sizes(tmp_path: Path) -> None:
    run_ranks(2, _train, str(tmp_path))
    (path,) = tmp_path.glob("graph*/report.json")
    report = json.loads(path.read_text())
    forward = next(each for each in report["programs"] if each["region"] == "forward")
    products = [node for node in forward["nodes"] if node["op"] == "addmm"]
    assert [node["flops"] for node in products] == [2 * 3 * 4 * 6, 2 * 3 * 6 * 4]
    assert [node["bytes"] for node in products] == [4 * 3 * 6, 4 * 3 * 4]
    assert forward["memory"]["peak_bytes"] > 0 and forward["timeline"]["seconds"] > 0
