"""`compare` says which programs of two dumps differ, since which pass, and in what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.passes.models import layout_for, mlp
from tests.program_builder import cut, trace_joint
from zerofx.config import ZeroConfig
from zerofx.cost.machine import machine_of
from zerofx.debug.compare import Difference, compare
from zerofx.errors import ConfigError
from zerofx.frontend.dump import dump_for
from zerofx.frontend.predict import Setting
from zerofx.ir.program import Program
from zerofx.passes.base import run_passes
from zerofx.passes.pipelines import pipeline


def dump(folder: Path, number: int = 0, **options: Any) -> Path:
    """The dump of a small model, compiled without ranks."""
    passes = pipeline(ZeroConfig(stage=3, **options))
    setting = Setting(machine_of("cpu"), 2, fused=False)
    observer = dump_for(str(folder), lambda: number, passes, setting)
    assert observer is not None

    def run(program: Program) -> Program:
        observer.begin(program)
        run_passes(program, passes, observer=observer)
        observer.end(program)
        return program

    for half in cut(run(trace_joint(mlp(layout_for(3, 2, 1)), 3))):
        run(half)
    return folder


def found(one: Path, other: Path) -> dict[str, Difference]:
    return {each.where: each for each in compare(one, other)}


def test_equal_dumps_do_not_differ(tmp_path: Path) -> None:
    assert compare(dump(tmp_path / "one"), dump(tmp_path / "two")) == []


def test_an_option_and_what_follows_from_it(tmp_path: Path) -> None:
    one, two = dump(tmp_path / "one", bucket_bytes=0), dump(tmp_path / "two", bucket_bytes=1 << 20)
    differences = found(one, two)
    assert list(differences) == ["graph0/forward", "graph0/backward"]
    forward = differences["graph0/forward"]
    assert "pass fuse_unshards: target_bytes 0 → 1048576" in forward.findings
    assert "3 → 1 gathers" in forward.findings
    assert "the texts differ from fuse_unshards on" in forward.findings
    assert "+full.a.weight" in forward.text or "-unshard.a.bias" in forward.text
    assert str(forward).startswith("graph0/forward:\n  pass fuse_unshards")


def test_passes_that_are_left_out(tmp_path: Path) -> None:
    one, two = dump(tmp_path / "one"), dump(tmp_path / "two", disable=("keep_unsharded",))
    (forward,) = compare(one / "graph0", two / "graph0")
    assert forward.where == "forward"
    assert "pass keep_unsharded does not run any more" in forward.findings
    assert "b.weight is not kept any more" in forward.findings
    (backwards,) = compare(two, one)
    assert "pass keep_unsharded runs in addition" in backwards.findings
    assert "b.weight is kept until backward" in backwards.findings


def test_a_graph_of_one_dump_alone(tmp_path: Path) -> None:
    one, two = dump(tmp_path / "one"), dump(tmp_path / "two")
    dump(two, number=1)
    assert {each.where for each in compare(one, two)} == {
        "graph1/joint",
        "graph1/forward",
        "graph1/backward",
    }
    assert all(each.findings == (f"only in {two}",) for each in compare(one, two))


def test_two_files(tmp_path: Path) -> None:
    root = dump(tmp_path / "one") / "graph0" / "forward"
    (difference,) = compare(root / "000_traced.txt", root / "003_insert_frees.txt")
    assert "+free(full.a.weight" in difference.text and difference.where == ""
    assert compare(root / "000_traced.txt", root / "000_traced.txt") == []


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    one, path = dump(tmp_path / "one"), tmp_path / "picture.png"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"picture\.png cannot be read as text") as refused:
        compare(one / "graph0" / "report.json", path)
    assert "two text files" in refused.value.remedy
    damaged = shutil.copytree(one, tmp_path / "damaged") / "graph0"
    shutil.copy(path, damaged / "forward" / "000_traced.txt")
    with pytest.raises(ConfigError, match=r"forward/000_traced\.txt cannot be read as text"):
        compare(one / "graph0", damaged)
    shutil.copy(one / "graph0" / "forward" / "000_traced.txt", damaged / "forward")
    (damaged / "backward" / "009_x.txt").mkdir()
    with pytest.raises(ConfigError, match=r"backward/009_x\.txt cannot be read as text") as refused:
        compare(damaged, one / "graph0")
    assert "dump it again" in refused.value.remedy


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    one = dump(tmp_path / "one")
    with pytest.raises(ConfigError, match="holds no dump"):
        compare(one, tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is a whole dump, the other is not"):
        compare(one, one / "graph0")
    empty = shutil.copytree(one, tmp_path / "empty")
    for text in (empty / "graph0" / "forward").glob("*.txt"):
        text.unlink()
    with pytest.raises(ConfigError, match="forward holds no program"):
        compare(one, empty)
    report = one / "graph0" / "report.json"
    report.write_text(json.dumps({**json.loads(report.read_text()), "version": 0}))
    with pytest.raises(ConfigError, match="version 0 of the schema, not 2"):
        compare(one, one)
