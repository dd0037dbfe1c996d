"""The page in a browser: what it shows, that it asks for nothing, and how it answers."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.page.browser import Tab
from tests.page.dumps import CPU, dump_gpt
from zerofx.cost.host import Host
from zerofx.frontend.rehearsal import Rehearsal

ORANGE = {"light": (0xE6, 0x9F, 0x00), "dark": (0xEE, 0xB0, 0x2C)}
PAPER = {"light": (0xF5, 0xF6, 0xF8), "dark": (0x0F, 0x12, 0x16)}


def _report(page: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((page.parent / "graph0" / "report.json").read_text())
    return report


def _text(tab: Tab, selector: str) -> str:
    return str(tab.run(f"document.querySelector({json.dumps(selector)}).innerText"))


def _count(tab: Tab, selector: str) -> int:
    return int(tab.run(f"document.querySelectorAll({json.dumps(selector)}).length"))


def _share(tab: Tab, colour: tuple[int, ...]) -> float:
    """Part of the visible pixels that have a colour, within rounding."""
    wanted = np.array(colour) / 255
    return float((np.abs(tab.pixels() - wanted).max(axis=2) < 0.02).mean())


def test_one_file_that_asks_for_nothing(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3])
    assert tab.errors == []
    assert {url.partition(":")[0] for url in tab.requests} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in tab.requests) == 1
    assert not re.search(r'(src|href)="(?!data:,)', pages[3].read_text().partition("<body>")[0])


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 420])
def test_drawn_in_light_and_dark_wide_and_narrow(
    tab: Tab, pages: dict[int, Path], stage: int, scheme: str, width: int
) -> None:
    tab.open(pages[stage], width, scheme=scheme)
    assert tab.errors == []
    other = "dark" if scheme == "light" else "light"
    assert _share(tab, PAPER[scheme]) > 0.02 and _share(tab, PAPER[other]) == 0
    tab.run("document.getElementById('step').scrollIntoView()")
    assert _share(tab, ORANGE[scheme]) > 0.003, "gathers are drawn"
    assert tab.run("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"


def test_theme_button_wins_over_the_system(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3], scheme="light")
    for wanted in ("light", "dark"):
        tab.run("document.getElementById('theme').click()")
        assert _text(tab, "#theme") == f"Theme: {wanted}"
        assert _share(tab, PAPER[wanted]) > 0.02
    tab.run("document.getElementById('theme').click()")
    assert _share(tab, PAPER["light"]) > 0.02


def test_chart_draws_what_the_report_says(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3])
    programs = [each for each in _report(pages[3])["programs"] if each["timeline"]]
    spans = [span for each in programs for span in each["timeline"]["spans"]]
    drawn = {kind: _count(tab, f"#lanes rect.{kind}") for kind in ("stall", "gather", "reduce")}
    assert drawn["stall"] == sum(span["stream"] == "stall" for span in spans)
    on_link = sum(span["stream"] == "link" for span in spans)
    assert drawn["gather"] + drawn["reduce"] == on_link > 12
    assert _count(tab, "#memory path") == 4 * len(programs)
    seconds = sum(each["timeline"]["seconds"] for each in programs)
    assert f"{1000 * seconds:.2f}"[:3] in _text(tab, ".tile .value")
    highest = max(programs, key=lambda each: each["memory"]["peak_bytes"])["memory"]
    assert highest["peak_node"] in _text(tab, "#peak-lead")
    assert highest["at_peak"][0]["name"] in _text(tab, "#peak-list")


def test_hover_tells_and_click_leads_to_the_node(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3])
    tab.run("document.getElementById('chart').scrollIntoView({block: 'center'})")
    box = tab.run(
        "(() => { const r = [...document.querySelectorAll('#lanes rect.reduce')][0]"
        ".getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    tab.move(*box)
    tip = _text(tab, "#tip")
    assert "backward" in tip and "on the link" in tip and "reduce." in tip and "gradients" in tip
    tab.click(*box)
    focused = tab.run("document.activeElement.dataset.name")
    assert focused.startswith("reduce.")
    assert tab.run("document.getElementById('by-region').value") == "backward"


@pytest.mark.parametrize(
    ("host", "words"),
    [(Host(kernel=1e-3), "waits to be launched"), (Host(contention=0.5), "slowed by the link")],
)
def test_hover_says_why_computation_stands_still(
    tab: Tab, gpt: Rehearsal, tmp_path: Path, host: Host, words: str
) -> None:
    dump_gpt(tmp_path, gpt, machine=dataclasses.replace(CPU, host=host))
    tab.open(tmp_path / "report.html")
    forward, backward = (each["timeline"] for each in _report(tmp_path / "report.html")["programs"])
    still = [span for span in forward["spans"] if span["stream"] in ("host", "slow")]
    span = max(still, key=lambda each: each["end"] - each["begin"])
    tab.run("document.getElementById('chart').scrollIntoView({block: 'center'})")
    x, y, width = tab.run(
        "(() => { const r = document.querySelector('#lanes rect.lane').getBoundingClientRect();"
        "return [r.x, r.y + r.height / 2, r.width]; })()"
    )
    middle = (span["begin"] + span["end"]) / 2 / (forward["seconds"] + backward["seconds"])
    tab.move(x + middle * width, y)
    tip = _text(tab, "#tip")
    assert words in tip and "undefined" not in tip


def test_program_table_filters(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3])
    rows = _report(pages[3])["programs"][0]["nodes"]
    assert _count(tab, "#node-table .row") == len(rows)

    def shown(**values: str) -> list[str]:
        for name, value in values.items():
            tab.run(
                f"(() => {{ const f = document.getElementById({json.dumps(name)});"
                f"f.value = {json.dumps(value)};"
                "f.dispatchEvent(new Event(f.tagName === 'INPUT' ? 'input' : 'change')); })()"
            )
        script = "[...document.querySelectorAll('#node-table .row:not([hidden])')]"
        return list(tab.run(f"{script}.map(r => r.dataset.name)"))

    inside = [row["name"] for row in rows if (row["module"] + ".").startswith("blocks.3.")]
    assert shown(**{"by-module": "blocks.3"}) == inside and inside
    gathers = [row["name"] for row in rows if row["kind"] == "gather"]
    assert shown(**{"by-module": "", "by-kind": "gather"}) == gathers
    bucket = rows[[row["name"] for row in rows].index(gathers[1])]["bucket"]
    assert shown(**{"by-bucket": bucket}) == [gathers[1]]
    frees = [row["name"] for row in rows if row["by"] == "insert_frees"]
    by_pass = {"by-bucket": "", "by-kind": "", "by-by": "insert_frees"}
    assert shown(**by_pass) == frees and frees
    assert shown(**{"by-by": "", "search": "qkv blocks.2 free"}) == ["free.blocks.2.qkv.weight"]
    assert shown(search="no such node") == []
    assert _text(tab, "#shown").startswith("0 of")


def test_a_thousand_nodes_are_filtered_within_100_ms(
    tab: Tab, pages: dict[int, Path], tmp_path: Path
) -> None:
    page = tmp_path / "long.html"
    text = pages[3].read_text()
    start = text.index('<script type="application/json" class="graph">') + 46
    end = text.index("</script>", start)
    report = json.loads(text[start:end])
    nodes = report["programs"][0]["nodes"]
    report["programs"][0]["nodes"] = [*nodes, *(nodes[i % len(nodes)] for i in range(1000))][:1000]
    data = json.dumps(report).replace("<", "\\u003c")
    page.write_text(text[:start] + data + text[end:])
    tab.open(page)
    assert _count(tab, "#node-table .row") == 1000
    took = tab.run(
        """(() => {
        const field = document.getElementById("search");
        const taken = (word) => {
          const begin = performance.now();
          field.value = word;
          field.dispatchEvent(new Event("input"));
          document.getElementById("node-table").getBoundingClientRect();
          return performance.now() - begin;
        };
        const words = ["blocks.3", "", "mm", "blocks.1 view", "zzz", ""];
        const worst = () => Math.max(...words.map(taken));
        return Math.min(...Array.from({ length: 5 }, worst)); })()"""
    )  # the best of five: others use the processor, too
    assert 0 < took < 100


def test_buckets_tell_bytes_and_reasons(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3])
    programs = [each for each in _report(pages[3])["programs"] if each["timeline"]]
    assert _count(tab, "#bucket-table tbody tr") == sum(len(p["collectives"]) for p in programs)
    text = _text(tab, "#bucket-table")
    assert "are too many" in text and "over the budget of" in text and "already here" in text
    assert not re.search(r"\d{6,} B", text), "sizes are readable"


def test_passes_show_their_diffs(tab: Tab, pages: dict[int, Path]) -> None:
    tab.open(pages[3])
    tab.run("document.querySelector('details[data-pass=insert_frees]').open = true")
    deadline = time.monotonic() + 10
    while not _count(tab, "details[open] pre") and time.monotonic() < deadline:
        tab.run("new Promise(done => setTimeout(done, 20))")
    diff = (pages[3].parent / "graph0" / "forward").glob("*_insert_frees.diff")
    added = [line for line in next(diff).read_text().splitlines() if re.match(r"\+(?!\+\+)", line)]
    assert _count(tab, "details[open] pre .added") == len(added)
    assert added[0] in _text(tab, "details[open] pre")


def _bytes(size: int) -> str:
    """Three digits, as the page writes them; for less than a megabyte."""
    if size < 999.5:
        return f"{size} B"
    digits = 2 if size < 9995 else 1 if size < 99950 else 0
    return f"{size / 1000:.{digits}f} kB"


def test_codes_and_both_hops_are_shown(tab: Tab, gpt: Rehearsal, tmp_path: Path) -> None:
    codes = {"quantize_weights": "int8x64", "quantize_gradients": ("int8x64", "int4x64")}
    dump_gpt(tmp_path, gpt, ranks_per_node=2, bucket_bytes=0, **codes)
    tab.open(tmp_path / "report.html")
    assert tab.errors == []
    text = _text(tab, "#bucket-table")
    (forward, backward) = json.loads((tmp_path / "graph0" / "report.json").read_text())["programs"]
    for each in forward["collectives"] + backward["collectives"]:
        if not each["scale_bytes"] or not each["seconds"]:
            continue
        scales, across = _bytes(each["scale_bytes"]), _bytes(each["across_nodes_bytes"])
        assert (
            f"{each['wire_dtype']}, scales {scales}" in text and f"{across} between nodes" in text
        )
    assert "int8x64 → int4x64" in text and "float32" in text
