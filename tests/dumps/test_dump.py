"""What a dump holds is complete, consistent, and the same on every run and rank."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dumps.everything import model, step
from tests.dumps.processes import torchrun
from tests.passes.test_refusals import FreeEarly
from tests.ranks import run_ranks
from tests.scripts import run_script
from zerofx.errors import VerificationError
from zerofx.frontend.capture import Capture
from zerofx.frontend.report import VERSION
from zerofx.passes import Editor, Pass, Program, Region, print_program

SCRIPT = Path(__file__).parent / "everything.py"
OPTIONS = {"bucket_bytes": 40, "prefetch_bytes": 0, "memory_budget": 0}
PASSES = ["copy_returned", "insert_unshards", "insert_frees", "sync_buffers", "fuse_unshards"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path, str]:
    """Two dumps of the same training, the folder of torch's trace of it, and its log."""
    first, second, trace = (tmp_path_factory.mktemp(name) for name in ("one", "two", "trace"))
    run_script(SCRIPT, json.dumps({**OPTIONS, "dump": str(first)}))
    # An older run had other passes and more graphs, and somebody keeps notes beside them.
    notes = second / "graph7" / "notes.txt"
    old = ("graph0/forward/003_old.diff", "graph7/backward/000_traced.txt", "graph7/report.json")
    for path in (*(second / each for each in old), notes):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old")
    log = torchrun(
        SCRIPT,
        json.dumps(OPTIONS),
        ZEROFX_DUMP=str(second),
        TORCH_TRACE=str(trace),
        TORCH_LOGS="+zerofx",
    )
    notes.unlink()
    return first, second, trace, log


def _files(root: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()
    }


def _report(runs: tuple[Path, Path, Path, str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((runs[0] / "graph0" / "report.json").read_text())
    return report


def test_two_runs_are_equal_byte_by_byte(runs: tuple[Path, Path, Path, str]) -> None:
    first, second = _files(runs[0]), _files(runs[1])
    assert first.keys() == second.keys()
    for name, content in first.items():
        assert content == second[name], name
    for region in ("joint", "forward", "backward"):
        assert f"graph0/{region}/000_traced.txt" in first
        assert f"graph0/{region}/program.py" in first
    text = b"".join(first.values()).decode()
    assert not re.search(r"0x[0-9a-f]{6}|object at|/tmp/|/home/", text), "an address or a path"


def test_report_lists_what_ran(runs: tuple[Path, Path, Path, str]) -> None:
    report = _report(runs)
    assert report["version"] == VERSION and report["stage"] == 3
    joint, forward, backward = report["programs"]
    regions = [each["region"] for each in report["programs"]]
    assert regions == ["joint", "forward", "backward"]
    assert [each["name"] for each in forward["passes"]] == [*PASSES, "keep_unsharded", "schedule"]
    before_the_cut = ["merge_unshards", "merge_reduces", "cast_before_gather"]
    assert [each["name"] for each in joint["passes"]] == before_the_cut
    frees = forward["passes"][2]
    assert frees["changed"] and frees["mandatory"] and frees["numerics"] == "exact"
    assert frees["plan"]["frees"][0][0] == "full.embed.weight"
    schedule = forward["passes"][-1]
    assert schedule["class"] == "zerofx.passes.schedule.Schedule"
    assert schedule["options"] == {"prefetch_bytes": 0}
    assert schedule["plan"]["cuts"] and "over the budget" in schedule["plan"]["reasons"][0][1]
    inputs = {each["name"]: each for each in forward["inputs"]}
    weight = {"role": "shard", "param": "start.weight", "dtype": "float32", "shape": [4, 6]}
    assert inputs["shard.start.weight"] == {"name": "shard.start.weight", **weight}
    assert inputs["buffer.batch.running_mean"]["role"] == "buffer"
    assert "input.0" in inputs and "saved.0" in {each["name"] for each in backward["inputs"]}


def test_report_adds_up(runs: tuple[Path, Path, Path, str]) -> None:
    report = _report(runs)
    _, forward, backward = report["programs"]
    numel = {
        "embed.weight": 66,
        "start.weight": 42,
        "start.bias": 7,
        "wait.weight": 42,
        "wait.bias": 6,
    }
    numel |= dict.fromkeys(("norm.weight", "norm.bias", "batch.weight", "batch.bias"), 6)
    reduced: dict[str, int] = {}
    for each in (forward, backward):
        starts = each["collectives"]
        assert each["wire_bytes"] == sum(start["wire_bytes"] for start in starts)
        several = [start for start in starts if len(start["members"]) > 1]
        assert [bucket["members"] for bucket in each["buckets"]] == [
            [member["param"] for member in start["members"]] for start in several
        ]
        for bucket in each["buckets"]:
            assert bucket["reason"] and bucket["full_bytes"] > 0 and bucket["name"]
        assert (
            0
            < each["peak_full_bytes"]
            <= sum(member["full_bytes"] for start in starts for member in start["members"])
        )
    for start in backward["collectives"]:
        if start["kind"] == "reduce":
            reduced |= {member["param"]: member["full_bytes"] for member in start["members"]}
    assert reduced.keys() == {*numel, "scale"}
    assert all(
        reduced[name] in (4 * size, 4 * size + 24, 4 * size + 4) for name, size in numel.items()
    ), "with padding of at most one row"
    assert forward["kept"] == [], "the budget is 0"
    assert report["wire_bytes_per_step"] == forward["wire_bytes"] + backward["wire_bytes"]


def test_structured_trace_holds_the_same_texts(runs: tuple[Path, Path, Path, str]) -> None:
    logs = sorted(runs[2].glob("*.log"))
    assert len(logs) == 2, "one of each rank"
    files = _files(runs[0] / "graph0")
    for log in logs:
        found = _artifacts(log)
        for name, content in files.items():
            if name.endswith((".txt", ".py")):
                text = found["zerofx_" + name.replace("/", "_").removesuffix(".txt")]
                assert text.rstrip("\n") == content.decode().rstrip("\n")
        assert json.loads(found["zerofx_report.json"])["version"] == VERSION


def _artifacts(log: Path) -> dict[str, str]:
    """Payloads by name; the records of torch's trace are followed by their payload, indented."""
    out: dict[str, str] = {}
    name = ""
    for line in log.read_text().splitlines():
        if line.startswith("\t"):
            if name:
                out[name] = out[name] + "\n" + line[1:] if name in out else line[1:]
            continue
        record = json.loads(line[line.index("{") :])
        name = record.get("artifact", {}).get("name", "")
        if not name.startswith("zerofx_"):
            name = ""
        else:
            out.pop(name, None)
            assert "stack" not in record and "frame_id" in record, "it belongs to a compilation"
    return out


def test_torch_logs_shows_programs_and_what_passes_changed(
    runs: tuple[Path, Path, Path, str],
) -> None:
    log = runs[3]
    assert "graph 0: forward program: 7 passes" in log
    assert "forward after 003_insert_frees" in log and "+free(full.start.weight" in log


@dataclasses.dataclass(frozen=True)
class Show(Pass):
    """Keeps the text of every finished program."""

    name: ClassVar[str] = "show"
    regions: ClassVar[frozenset[Region]] = frozenset(Region)
    seen: ClassVar[list[str]] = []

    def plan(self, program: Program) -> str:
        return print_program(program)

    def apply(self, edit: Editor, plan: str) -> None:
        self.seen.append(plan)


def _texts(stage: int) -> list[str]:
    Show.seen.clear()
    step(model(), stage, passes=(Show(),))
    return list(Show.seen)


@pytest.mark.parametrize("stage", [3, 1])
def test_ranks_print_the_same_text_although_shards_are_uneven(stage: int) -> None:
    first, second = run_ranks(2, _texts, stage)
    assert len(first) == 3 and first == second


class _Drops(nn.Module):
    """Dynamo first takes the rate for a symbol, and begins again with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last, self.rate = nn.LayerNorm(8), nn.Linear(8, 4), 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(x), self.rate)).square().mean()


def _dumped(folder: str) -> tuple[int, list[str]]:
    calls: list[int] = []
    capture = Capture.compile

    def count(*args: Any) -> Any:
        calls.append(0)
        return capture(*args)

    options = {"inner": "eager", "min_shard_numel": 0, "dump": folder}
    with patch.object(Capture, "compile", count):
        run: Any = torch.compile(_Drops(), backend="zero3", dynamic=True, options=options)
        run(torch.ones(3, 8)).backward()
    return len(calls), [each.name for each in Path(folder).glob("graph*/report.json")]


def test_a_graph_that_dynamo_begins_again_is_one_graph(tmp_path: Path) -> None:
    ((calls, reports),) = run_ranks(1, _dumped, str(tmp_path))
    assert calls == 2 and len(reports) == 1
    assert len(list(tmp_path.glob("graph*"))) == 1


def _refused(folder: str) -> str:
    options = {"inner": "eager", "min_shard_numel": 0, "dump": folder, "passes": [FreeEarly()]}
    run: Any = torch.compile(nn.Linear(4, 4), backend="zero3", options=options)
    with pytest.raises(VerificationError) as refused:
        run(torch.ones(2, 4))
    return str(refused.value)


def test_what_a_refused_pass_left_can_be_read(tmp_path: Path) -> None:
    for message in run_ranks(2, _refused, str(tmp_path)):
        assert "after pass free_early" in message
    (change,) = tmp_path.glob("graph*/forward/*_free_early.diff")
    assert "free" in change.read_text() and change.with_suffix(".txt").exists()
