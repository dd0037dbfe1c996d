"""Every figure of a report follows the program: bucket size, link, depth, stage."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.page.dumps import CPU, dump_gpt, rehearse
from zerofx.config import ZeroConfig
from zerofx.cost.compute import Roofline
from zerofx.cost.lifetimes import lifetimes, live_at_each_node
from zerofx.cost.link import Link
from zerofx.cost.liveness import NOTHING_HELD, held_after, live_bytes
from zerofx.cost.machine import Machine, already_whole, machine_of
from zerofx.cost.tables import CommCost, CommTable
from zerofx.frontend.rehearsal import Rehearsal
from zerofx.frontend.report import VERSION

SLOW = Machine("cpu", Roofline(), Link(1e8, 1e-4))
FAST = Machine("cpu", Roofline(1e12, 1e11), Link(1e9, 1e-4))


def figures(folder: Path, rehearsal: Rehearsal, **options: Any) -> dict[str, Any]:
    """What the page shows, summed over the programs of a step."""
    dump_gpt(folder, rehearsal, **options)
    report = json.loads((folder / "graph0" / "report.json").read_text())
    programs = report["programs"]
    names = ("seconds", "compute_seconds", "link_seconds", "exposed_seconds")
    found = {name: sum(p["timeline"][name] for p in programs) for name in names}
    starts = [start for p in programs for start in p["collectives"]]
    return {
        **found,
        "peak_bytes": max(p["memory"]["peak_bytes"] for p in programs),
        "peaks": [p["memory"]["peak_node"] for p in programs],
        "nodes": sum(len(p["nodes"]) for p in programs),
        "collectives": len(starts),
        "sent": report["wire_bytes_per_step"],
        "reasons": {each["reason"] for p in programs for each in p["buckets"]},
        "exposed": [start["exposed_seconds"] for start in starts],
    }


@pytest.fixture(scope="module")
def base(gpt: Rehearsal, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return figures(tmp_path_factory.mktemp("base"), gpt)


def _changed(base: dict[str, Any], other: dict[str, Any]) -> set[str]:
    return {name for name in base if base[name] != other[name]}


def test_bucket_size(base: dict[str, Any], gpt: Rehearsal, tmp_path: Path) -> None:
    found = figures(tmp_path, gpt, bucket_bytes=0)
    # Less lives at the peak, which is where it was.
    assert {*base} - _changed(base, found) == {"compute_seconds", "peaks"}
    assert found["collectives"] > base["collectives"]
    assert found["link_seconds"] > base["link_seconds"], "each pays the latency"
    assert not found["reasons"] and found["peak_bytes"] < base["peak_bytes"]


def test_link(base: dict[str, Any], gpt: Rehearsal, tmp_path: Path) -> None:
    found = figures(tmp_path, gpt, machine=SLOW)
    assert _changed(base, found) == {"seconds", "link_seconds", "exposed_seconds", "exposed"}
    assert found["exposed_seconds"] > base["exposed_seconds"]


def test_speed_of_computation(base: dict[str, Any], gpt: Rehearsal, tmp_path: Path) -> None:
    found = figures(tmp_path, gpt, machine=FAST)
    assert found["compute_seconds"] < base["compute_seconds"] / 5
    assert found["link_seconds"] == base["link_seconds"]


def test_depth(base: dict[str, Any], tmp_path: Path) -> None:
    found = figures(tmp_path, rehearse(5))
    assert _changed(base, found) == {*base}
    for name in ("seconds", "compute_seconds", "link_seconds", "peak_bytes", "nodes", "sent"):
        assert found[name] > base[name], name


def test_stage(base: dict[str, Any], gpt: Rehearsal, tmp_path: Path) -> None:
    found = figures(tmp_path, gpt, stage=1)
    same = {"compute_seconds", "reasons", "collectives"}
    assert _changed(base, found) == {*base} - same
    assert found["sent"] < base["sent"], "2Ψ instead of 3Ψ"


def test_ranks(base: dict[str, Any], gpt: Rehearsal, tmp_path: Path) -> None:
    found = figures(tmp_path, gpt, ranks=8)
    assert found["sent"] > base["sent"] and found["link_seconds"] > base["link_seconds"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_lives_adds_up_to_the_curve(gpt: Rehearsal, stage: int) -> None:
    """Names and sums are two ways to count the same memory."""
    config: Any = ZeroConfig(stage=stage, inner="eager")  # type: ignore[arg-type]
    forward, backward = gpt.programs(config, 4)
    before = held_after(forward, CPU.algorithms, fused=False)
    for program, held in ((forward, NOTHING_HELD), (backward, before)):
        curve = live_bytes(program, CPU.algorithms, fused=False, before=held)
        lives = lifetimes(program, CPU.algorithms, fused=False, before=held)
        rows = live_at_each_node(lives, len(program.graph.nodes))
        assert rows[:, :3].sum(axis=1).max() == curve.live[:, :3].sum(axis=1).max()
        assert rows[:, 3].max() == curve.live[:, 3].max()


@pytest.mark.parametrize("stage", [1, 3])
def test_a_report_adds_up(gpt: Rehearsal, stage: int, tmp_path: Path) -> None:
    dump_gpt(tmp_path, gpt, stage)
    report = json.loads((tmp_path / "graph0" / "report.json").read_text())
    for program in report["programs"]:
        timeline, memory = program["timeline"], program["memory"]
        assert timeline["seconds"] == pytest.approx(
            timeline["compute_seconds"] + timeline["exposed_seconds"]
        )
        stalls = [s for s in timeline["spans"] if s["stream"] == "stall"]
        exposed = sum(start["exposed_seconds"] for start in program["collectives"])
        assert exposed == pytest.approx(sum(s["end"] - s["begin"] for s in stalls), abs=1e-8)
        assert sum(each["bytes"] for each in memory["at_peak"]) == memory["peak_bytes"]
        assert max(sum(row[1:]) for row in memory["curve"]) == memory["peak_bytes"]
        names = {node["name"] for node in program["nodes"]}
        assert memory["peak_node"] in names
        assert {span["node"] for span in timeline["spans"]} <= names


@pytest.mark.parametrize("options", [{}, {"replicate": 2}])
def test_a_report_names_the_axes(options: dict[str, Any], gpt: Rehearsal, tmp_path: Path) -> None:
    dump_gpt(tmp_path, gpt, min_shard_numel=4096, **options)
    found: dict[str, set[str]] = {"unshard": set(), "reduce": set()}
    for program in json.loads((tmp_path / "graph0" / "report.json").read_text())["programs"]:
        for each in program["collectives"]:
            found[each["kind"]].add(each["axis"])
    both = "shard, replicate" if options else "shard"
    assert found == {"unshard": {"shard"}, "reduce": {both, "replicate"}}


def test_a_report_tells_copies_from_computation(gpt: Rehearsal, tmp_path: Path) -> None:
    dump_gpt(tmp_path, gpt, secondary_shards=True, ranks_per_node=2, memory_budget=0)
    forward, backward = json.loads((tmp_path / "graph0" / "report.json").read_text())["programs"]
    kinds = {node["op"]: node["kind"] for node in forward["nodes"]}
    assert kinds["keep_shard"] == "keep" and kinds["free"] == "free"
    axes = {each["axis"] for each in backward["collectives"] if each["kind"] == "unshard"}
    assert axes == {"node"}


def test_the_page_reads_the_schema_that_is_written() -> None:
    source = files("zerofx.page").joinpath("main.js").read_text()
    assert re.findall(r"version === (\d+)", source) == [str(VERSION)]


def test_a_gather_of_what_is_there_takes_no_time(gpt: Rehearsal) -> None:
    config: Any = ZeroConfig(stage=1, inner="eager")
    forward, backward = gpt.programs(config, 4)
    assert already_whole(forward, frozenset()) == frozenset()
    assert already_whole(backward, frozenset()) == {
        name for name, spec in backward.params.items() if spec.layout.resident
    }


def test_a_measured_link_wins() -> None:
    costs = [
        CommCost("all_gather", "native", "float32", 1e-3, 1e-8),
        CommCost("reduce_scatter", "native", "float32", 2e-3, 2e-8),
    ]
    machine = machine_of("cpu", CommTable("any", tuple(costs)))
    assert machine.measured and not machine_of("cpu").measured
    assert machine.link == Link(1e8, 1e-3) and machine.reductions == Link(5e7, 2e-3)
    assert machine_of("cuda").roofline.flops > 1000 * machine_of("cpu").roofline.flops
