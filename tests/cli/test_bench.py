"""`zerofx bench comm` between real ranks, and `zerofx diff`."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from zerofx.cli.main import main
from zerofx.cost.tables import loads


def _bench(cache: str, *argv: str) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("ZEROFX_CACHE", f"{cache}/{dist.get_rank()}")
        sizes = ["--size", "4KiB", "--size", "64KiB", "--repeats", "1"]
        return main(["bench", "comm", *sizes, *argv]), out.getvalue()


def test_rank_0_keeps_what_all_measured(tmp_path: Path) -> None:
    (code, said), other = run_ranks(2, _bench, str(tmp_path))
    assert (code, other) == (0, (0, ""))
    (kept,) = tmp_path.rglob("*.json")
    assert kept.parts[len(tmp_path.parts)] == "0"
    table = loads(kept.read_text())
    assert table.topology == kept.stem and kept.stem in said
    assert {cost.algorithm for cost in table.costs} == {"native", "point_to_point"}


def test_as_data_and_forgotten(tmp_path: Path) -> None:
    (code, said), other = run_ranks(2, _bench, str(tmp_path), "--json", "--forget")
    assert (code, other) == (0, (0, ""))
    assert loads(said).costs
    assert not list(tmp_path.rglob("*.json"))


def test_without_ranks_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "comm"]) == 2
    assert "torchrun --nproc-per-node 2 -m zerofx bench comm" in capsys.readouterr().err
    assert main(["bench", "comm", "--repeats", "0"]) == 2


def test_diff(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("a\nb\n")
    other.write_text("a\nb\n")
    assert main(["diff", str(one), str(other)]) == 0
    assert capsys.readouterr().out.strip() == "no difference"
    other.write_text("a\nc\n")
    assert main(["diff", str(one), str(other), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert "-b" in found["text"] and "+c" in found["text"]
    assert main(["diff", str(one), str(tmp_path / "none")]) == 2
