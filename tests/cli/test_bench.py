"""`zerofx bench comm` between real ranks, and `zerofx diff`."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from zerofx.cli.main import main
from zerofx.cost.machine import loads_machine
from zerofx.cost.tables import loads


def _bench(cache: str, *argv: str, what: str = "comm") -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setenv("ZEROFX_CACHE", f"{cache}/{dist.get_rank()}")
        sizes = ["--size", "4KiB", "--size", "64KiB", "--repeats", "1"]
        return main(["bench", what, *sizes, *argv]), out.getvalue()


def test_rank_0_keeps_what_all_measured(tmp_path: Path) -> None:
    (code, said), other = run_ranks(2, _bench, str(tmp_path))
    assert (code, other) == (0, (0, ""))
    (kept,) = tmp_path.rglob("*.json")
    assert kept.parts[len(tmp_path.parts)] == "0"
    table = loads(kept.read_text())
    assert table.topology == kept.stem and kept.stem in said
    assert set(table.links()) == {"all_gather", "reduce_scatter", "all_reduce", "all_to_all"}
    assert all(name in said for name in table.links())
    assert {cost.algorithm for cost in table.costs} == {"native", "point_to_point"}


def test_as_data_and_forgotten(tmp_path: Path) -> None:
    (code, said), other = run_ranks(2, _bench, str(tmp_path), "--json", "--forget")
    assert (code, other) == (0, (0, ""))
    assert loads(said).costs
    assert not list(tmp_path.rglob("*.json"))


def test_a_machine_is_measured_and_kept(tmp_path: Path) -> None:
    steps = ("--steps", "2")
    (code, said), other = run_ranks(2, _bench, str(tmp_path), *steps, what="machine", timeout=120)
    assert (code, other) == (0, (0, ""))
    (kept,) = tmp_path.rglob("*.json")
    machine = loads_machine(kept.read_text())
    assert kept.parent.name == "machine" and kept.stem in said
    assert machine.measured and machine.device == "cpu"
    links = (machine.link, machine.reductions, machine.all_reduces, machine.all_to_alls)
    assert None not in links and len(set(links)) == 4
    assert machine.roofline.flops > 1e8 and machine.roofline.bytes_per_second > 1e7
    host = dataclasses.asdict(machine.host)
    assert not host.pop("runs_ahead")
    processor = host.pop("processor")
    assert all(value >= 0 for value in (*host.values(), *processor.values()))
    assert processor["ranks_per_core"] > 0 and processor["gathered"] > 0 < processor["reduced"]
    assert host["contention"] <= 1
    # Two programs, collectives and their members are not free, however the cost is split.
    assert host["program"] + host["collective"] + host["member"] > 1e-6
    assert host["update_rate"] > 1e6


def test_without_ranks_there_is_nothing_to_measure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", "comm"]) == 2
    assert "torchrun --nproc-per-node 2 -m zerofx bench comm" in capsys.readouterr().err
    assert main(["bench", "comm", "--repeats", "0"]) == 2
    capsys.readouterr()
    for sizes in (["--size", "4KiB"], ["--size", "4KiB", "--size", "4096B"]):
        assert main(["bench", "comm", *sizes]) == 2
        assert "of one size do not tell latency from bandwidth" in capsys.readouterr().err


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
