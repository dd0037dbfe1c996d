"""A measured run stands beside the prediction, in files of its own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerofx
from tests.hard.pair import EAGER, draw
from tests.page.browser import Tab
from tests.ranks import run_ranks
from zerofx.config import ZeroConfig
from zerofx.errors import ConfigError


def _train(folder: str) -> None:
    for name, options in (("plain", {}), ("measured", {"measure": 1})):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
        zerofx.shard(model, ZeroConfig(3, **EAGER, dump=f"{folder}/{name}", **options))
        run: Any = torch.compile(model, backend="zero3", options=EAGER)
        for number in range(3):
            run(draw(2, 4, seed=number)).sum().backward()
            if number == 0:
                assert not [*Path(folder).rglob("measured.json")], "that run was not asked for"


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_is_timed_step_by_step(tmp_path: Path, tab: Tab) -> None:
    run_ranks(2, _train, str(tmp_path))
    (plain,) = (tmp_path / "plain").glob("graph*")
    (folder,) = (tmp_path / "measured").glob("graph*")
    assert not [*plain.rglob("measured.json")]
    report = _json(folder / "report.json")
    for one, other in zip(
        report["programs"], _json(plain / "report.json")["programs"], strict=True
    ):
        assert one["timeline"] == other["timeline"] and one["nodes"] == other["nodes"]
    stalls = 0
    for program in (each for each in report["programs"] if each["timeline"]):
        found = _json(folder / program["region"] / "measured.json")
        names = {node["name"]: node["kind"] for node in program["nodes"]}
        kinds = {
            "link": ("gather", "reduce"),
            "stall": ("gather", "reduce"),
            "compute": ("compute", "view"),
        }
        for span in found["spans"]:
            assert names[span["node"]] in kinds[span["stream"]], span
            assert 0 <= span["begin"] <= span["end"] <= found["seconds"]
        thread = [span for span in found["spans"] if span["stream"] != "link"]
        assert all(one["end"] <= two["begin"] for one, two in itertools.pairwise(thread))
        links = [span["node"] for span in found["spans"] if span["stream"] == "link"]
        assert links == [start["node"] for start in program["collectives"]]
        waits = [s["end"] - s["begin"] for s in thread if s["stream"] == "stall"]
        assert found["exposed_seconds"] == pytest.approx(sum(waits))
        stalls += len(thread)
    tab.open(tmp_path / "measured" / "report.html")
    assert tab.errors == []
    assert tab.run("document.querySelectorAll('#lanes title').length") == stalls
    assert "measured" in tab.run("document.getElementById('lanes').textContent")
    assert "measured: " in tab.run("document.getElementById('tiles').innerText")
    tab.open(tmp_path / "plain" / "report.html")
    assert "measured" not in tab.run("document.getElementById('lanes').textContent")


def test_without_a_dump_there_is_nowhere_to_write() -> None:
    with pytest.raises(ConfigError, match="measure has no meaning without a dump"):
        ZeroConfig(measure=1, dump="")
    with pytest.raises(ConfigError, match="measure=-1"):
        ZeroConfig(measure=-1, dump="somewhere")
