"""`zerofx report`: the page of a dump, its figures as text and as data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.page.dumps import dump_gpt, rehearse
from zerofx.cli.main import main
from zerofx.errors import ConfigError
from zerofx.page.build import build_page


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump")
    rehearsal = rehearse(1, width=16)
    for number in (0, 1):
        dump_gpt(folder, rehearsal, number=number)
    return folder


def test_the_page_is_that_of_the_dump(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = (dump / "report.html").read_text()
    assert main(["report", str(dump)]) == 0
    said = capsys.readouterr().out
    assert "graph0/forward: " in said and "graph1/backward: " in said and "exposed" in said
    assert (dump / "report.html").read_text() == written == build_page(dump)
    assert written.count('class="graph"') == 2 and "{{" not in written.partition("<script")[0]


def test_one_graph_into_a_file_as_data(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "one.html"
    assert main(["report", str(dump / "graph1"), "-o", str(target), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["page"] == str(target) and target.read_text().count('class="graph"') == 1
    report = json.loads((dump / "graph1" / "report.json").read_text())
    first = data["programs"][0]
    assert first["program"] == "graph1/forward"
    assert first["seconds"] == report["programs"][0]["timeline"]["seconds"] > 0
    assert first["peak_bytes"] == report["programs"][0]["memory"]["peak_bytes"] > 0


def test_what_is_no_dump_is_refused(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no dump" in capsys.readouterr().err
    assert main(["report", str(dump), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "is no folder" in capsys.readouterr().err
    (tmp_path / "report.json").write_text(json.dumps({"version": 0, "programs": []}))
    assert main(["report", str(tmp_path)]) == 2
    assert "version 0 of the schema" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"version": 2', "cannot be read as JSON"),
        ("[]", "holds a JSON list"),
        ('{"version": 2}', "lists no programs"),
        ("[" * 100_000, "cannot be read as JSON"),
        ('{"version": 2, "programs": []}', "lists no programs"),
        ('{"version": 2, "programs": [{"region": "forward"}]}', "is damaged"),
        ('{"version": 2, "programs": [2]}', "is damaged\n  - programs[0] is 2\n"),
    ],
)
def test_a_damaged_dump_is_named(
    text: str, said: str, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    for argv in (["report", str(tmp_path)], ["diff", str(dump), str(tmp_path)]):
        assert main(argv) == 2
        found = capsys.readouterr().err
        assert f"{path} {said}" in found and "Remedy: dump it again" in found
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("damage", ["bytes", "folder"])
def test_a_damaged_diff_is_named(
    damage: str, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(dump / "graph0", tmp_path / "damaged")
    path = damaged / "forward" / "009_x.diff"
    if damage == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"\xff\xfe")
    assert main(["report", str(damaged)]) == 2
    said = capsys.readouterr().err
    assert f"{path} cannot be read as text" in said and "Remedy: dump it again" in said


def test_a_damaged_measurement_is_named(dump: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(dump, tmp_path / "damaged")
    (damaged / "graph0" / "forward" / "measured.json").write_text('{"steps": [')
    with pytest.raises(ConfigError, match=r"forward/measured\.json cannot be read as JSON"):
        build_page(damaged)


def test_a_folder_is_no_page(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(dump), "-o", str(dump)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "page.html.partial").mkdir()
    assert main(["report", str(dump), "-o", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert "the page cannot be written: " in said and "-o FILE" in said


def test_data_cannot_end_its_script(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(json.dumps({"version": 2, "x": "</script>{{script}}"}))
    assert "</script>{{script}}" not in build_page(tmp_path)
    assert build_page(tmp_path).count("\\u003c/script>{{script}}") == 1


@pytest.mark.parametrize("key", ["nodes", "timeline.exposed_seconds", "memory.peak_node"])
def test_a_missing_key_is_named(
    key: str, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    report = json.loads((dump / "graph0" / "report.json").read_text())
    place = report["programs"][1]
    *outer, last = key.split(".")
    for name in outer:
        place = place[name]
    del place[last]
    path.write_text(json.dumps(report))
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{path} is damaged" in said and f"programs[1].{key} is missing" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("region", None),
        ("region", "nonsense"),
        ("region", "../.."),
        ("passes", None),
        ("passes.0.options", []),
        ("collectives", None),
        ("collectives.0.kind", 1),
        ("kept", None),
        ("kept.0", [1]),
        ("wire_bytes", None),
        ("peak_full_bytes", "x"),
        ("nodes", None),
        ("timeline", 3),
        ("timeline", None),
        ("timeline.seconds", "x"),
        ("memory", None),
        ("memory.peak_bytes", "x"),
    ],
)
def test_a_key_of_a_wrong_type_is_named(
    key: str, value: object, dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    report = json.loads((dump / "graph0" / "report.json").read_text())
    place = report["programs"][0]
    place["kept"] = place["kept"] or ["a.weight"]
    *outer, last = (int(part) if part.isdigit() else part for part in key.split("."))
    for part in outer:
        place = place[part]
    place[last] = value
    path.write_text(json.dumps(report))
    where = f"programs[0].{key}".replace(".0", "[0]")
    for argv in (["report", str(tmp_path)], ["diff", str(dump / "graph0"), str(tmp_path)]):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert f"{path} is damaged\n  - {where} is {value!r}\nRemedy: dump it again" in said
    assert not (tmp_path / "report.html").exists()


def test_a_graph_without_its_report_is_named(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = shutil.copytree(dump, tmp_path / "damaged")
    (damaged / "graph0" / "report.json").unlink()
    for argv in (["report", str(damaged)], ["diff", str(dump), str(damaged)]):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert f"{damaged / 'graph0'} holds programs, but no file report.json" in said
        assert "Remedy: dump it again to the end, or name a folder" in said
    assert main(["report", str(damaged / "graph1")]) == 0
    for region in ("forward", "backward"):
        shutil.rmtree(damaged / "graph0" / region)
    (damaged / "graph0" / "notes.txt").write_text("the user's")
    assert main(["report", str(damaged)]) == 0
