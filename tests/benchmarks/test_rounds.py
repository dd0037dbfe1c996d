"""Turns, and what becomes of a contender that fails."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import __main__ as compare
from benchmarks.compare import rounds, trial
from benchmarks.compare.contenders import CONTENDERS, contender
from benchmarks.compare.rounds import Place, run_rounds, run_trial
from benchmarks.compare.trial import Outcome, Trial, parse, run
from benchmarks.netlab import Lab


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(2, None, tmp_path)


def _pretend(monkeypatch: pytest.MonkeyPatch, outcome: Outcome | None, code: int = 0) -> None:
    """Ranks that leave this outcome, without starting any."""

    def leave(commands: list[list[str]], *_: Any) -> int:
        if outcome:
            result = commands[0][-1].removeprefix("--result=")
            Path(result).write_text(json.dumps(dataclasses.asdict(outcome)))
        return code

    monkeypatch.setattr(rounds, "run_all", leave)


def test_an_outcome_is_read(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    _pretend(monkeypatch, Outcome("zero3", step_ms=5))
    assert run_trial(Trial("zero3"), place) == Outcome("zero3", step_ms=5)


def test_ranks_that_die_silently_have_failed(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    _pretend(monkeypatch, None, code=-9)
    found = run_trial(Trial("zero3"), place)
    assert found.failure.startswith("ended with code -9; see ")


def test_too_slow_is_a_failure(monkeypatch: pytest.MonkeyPatch, place: Place) -> None:
    def late(*_: Any) -> int:
        raise TimeoutError("not done after 1 s")

    monkeypatch.setattr(rounds, "run_all", late)
    assert "not done after 1 s" in run_trial(Trial("zero3"), place).failure


def test_contenders_take_turns_and_who_fails_is_out(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    def pretend(trial: Trial, _: Place) -> Outcome:
        bad = trial.contender == "ddp" and not trial.memory
        return Outcome(trial.contender, failure="broken" if bad else "")

    monkeypatch.setattr(rounds, "run_trial", pretend)
    names = ("ddp", "zero3")
    trials = [Trial(name, memory=memory) for memory in (True, False) for name in names]
    order: list[str] = []
    found = run_rounds(trials, 2, place, lambda trial, _: order.append(trial.contender))
    assert order == ["ddp", "zero3", "ddp", "zero3", "zero3"]
    assert [one.failure for one in found if one.contender == "ddp"] == ["", "broken"]


def test_a_trial_survives_its_command_line(tmp_path: Path) -> None:
    for one in (Trial("zero3", warmup=7, interface="eth0"), Trial("ddp", memory=True)):
        again, result = parse([*one.arguments(), f"--result={tmp_path / 'x'}"])
        assert again == one
        assert result == tmp_path / "x"


def test_the_first_rank_that_fails_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Others see its end only, and fail of that."""
    monkeypatch.setattr("torch.distributed.init_process_group", lambda *_: None)
    result = tmp_path / "outcome.json"
    for error in (ValueError("no such head"), RuntimeError("Connection closed by peer")):

        def fails(_: Trial, error: Exception = error) -> Outcome:
            raise error

        monkeypatch.setattr(trial, "run", fails)
        with pytest.raises(SystemExit):
            trial.main(["--contender=zero3", f"--result={result}"])
    assert json.loads(result.read_text())["failure"] == "ValueError: no such head"


def test_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A contender that does nothing, through the code that ranks run."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda *_: 1)
    monkeypatch.setattr("torch.distributed.get_rank", lambda *_: 0)
    monkeypatch.setattr("torch.distributed.get_node_local_rank", lambda *_: 0)
    monkeypatch.setattr("torch.distributed.barrier", lambda *_: None)
    monkeypatch.setattr(
        "torch.distributed.all_gather_object", lambda out, value: out.__setitem__(0, value)
    )
    monkeypatch.setitem(CONTENDERS, "eager", dataclasses.replace(CONTENDERS["ddp"], name="eager"))
    contender("eager", traffic=2)(lambda model, lr: lambda batch: model(*batch).detach())
    found = run(Trial("eager", model="tiny", warmup=2, steps=2))
    assert len(found.losses) == 2
    assert found.step_ms > 0
    assert found.num_units == 32
    assert run(Trial("eager", model="tiny", memory=True)).peak_bytes > 4 * found.num_params


def test_rates_need_hosts() -> None:
    with pytest.raises(SystemExit):
        compare.parse(["--rate", "1gbit"])
    assert compare.parse([]).ranks == 2
    assert compare.parse(["--hosts", "4"]).ranks == 1


def test_files_are_tried_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for option in ("--json", "--markdown", "--plot"):
        with pytest.raises(SystemExit):
            compare.parse([option, str(tmp_path / "file" / "found")])
    compare.parse(["--markdown", str(tmp_path / "new" / "found")])
    assert [each.name for each in tmp_path.rglob("*")] == ["file", "new"]


def test_nobody_ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _pretend(monkeypatch, None, code=1)
    found = tmp_path / "new" / "found.json"
    options = ["--contenders", "ddp", "--rounds", "1", "--logs", str(tmp_path)]
    with pytest.raises(SystemExit) as left:
        compare.main([*options, "--json", str(found)])
    assert left.value.code == 1
    assert "code 1" in json.loads(found.read_text())["figures"][0]["failure"]


def test_places() -> None:
    place = Place(2, Lab(3), Path("logs"))
    assert (place.world, place.interface_for("cuda")) == (6, "eth0")
    assert len(place.commands(["--contender=zero3"])) == 3
    alone = Place(2, None, Path("logs"))
    assert (alone.interface_for("cpu"), alone.interface_for("cuda")) == ("lo", "")
