"""Folders of graphs: whose they are, their names, and what cannot be written into them."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tests.page.dumps import CPU, dump_gpt, rehearse
from tests.passes.models import layout_for, mlp
from tests.program_builder import trace_joint
from zerofx.config import ZeroConfig
from zerofx.debug.compare import compare
from zerofx.errors import ConfigError
from zerofx.frontend.dump import dump_for
from zerofx.frontend.dump_place import place_of
from zerofx.frontend.predict import Setting
from zerofx.page.build import find_reports
from zerofx.passes.pipelines import pipeline

SETTING = Setting(CPU, 2, fused=False)
PASSES = pipeline(ZeroConfig(stage=3))


def test_folders_of_other_names_are_the_users(tmp_path: Path) -> None:
    rehearsal = rehearse(1, width=16)
    dump_gpt(tmp_path, rehearsal)
    for name in ("graph0_before", "graph", "graph01", "graph²"):
        shutil.copytree(tmp_path / "graph0", tmp_path / name)
    dump_gpt(tmp_path, rehearsal, number=10)
    dump_gpt(tmp_path, rehearsal, number=2)
    assert [path.parent.name for path in find_reports(tmp_path)] == ["graph0", "graph2"]
    assert (tmp_path / "graph0_before" / "report.json").is_file()
    assert compare(tmp_path, tmp_path) == []


def test_a_rehearsal_is_no_graph_of_a_dump(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("zerofx.frontend.dump_place._taken")
    with caplog.at_level(logging.INFO, "zerofx.programs"):
        rehearse(1, width=16)
    assert not caplog.records


def test_numbers_are_those_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a process that dumps into two folders begins the second behind an older run's graphs."""
    one, two = (str(tmp_path / name) for name in ("one", "two"))
    taken = [place_of(folder, None).take_number() for folder in (one, one, two, "", one)]
    assert taken == [0, 1, 0, place_of("", None).take_number() - 1, 2]
    place_of(one, None).give_back(1)
    monkeypatch.chdir(tmp_path)
    again = place_of("one", None)
    assert (again.written, again.take_number(), again.take_number()) == (one, 1, 3)


def test_a_graph_without_programs_has_neither_number_nor_folder(tmp_path: Path) -> None:
    numbers = iter(range(1))
    dump = dump_for(str(tmp_path), lambda: next(numbers), (), SETTING)
    assert dump is None and not list(tmp_path.iterdir()) and next(numbers) == 0


def test_what_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    dump = dump_for(str(tmp_path), lambda: 0, PASSES, SETTING)
    assert dump is not None
    (tmp_path / "graph0" / "joint").write_text("in the way")
    program = trace_joint(mlp(layout_for(3, 2, 1)), 3)
    with pytest.raises(ConfigError, match="option dump: nothing can be written into") as refused:
        dump.begin(program)
    assert "room on its disk" in refused.value.remedy
    (tmp_path / "graph0" / "joint").unlink()
    dump.begin(program)
    (tmp_path / "graph0" / "joint" / "program.py").mkdir()
    with pytest.raises(ConfigError, match="option dump"):
        dump.end(program)
    shutil.rmtree(tmp_path / "graph0")
    with pytest.raises(ConfigError, match="option dump"):
        dump.measured("joint", {})
