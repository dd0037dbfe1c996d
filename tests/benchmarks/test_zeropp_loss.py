"""What the benchmark of codes runs, and what it takes from files; no rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import zeropp_loss


def _settings(*options: str) -> dict[str, Any]:
    return zeropp_loss._settings(zeropp_loss._arguments(options))


def test_files_of_other_settings_are_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def pretend(commands: list[list[str]], *_: Any) -> int:
        name = commands[0][-1]
        ran.append(name)
        _leave(name, _settings("--steps", "25"))
        return 0

    def _leave(name: str, settings: dict[str, Any]) -> None:
        found = {"losses": {"0": 4.0, "25": 3.0}, "settings": settings}
        (tmp_path / f"{name.replace(', ', '_')}.json").write_text(json.dumps(found))

    monkeypatch.setattr(zeropp_loss, "run_all", pretend)
    again = ["--steps", "25", "--out", str(tmp_path), "--contenders", "int8, int4"]
    for _ in range(2):
        zeropp_loss.main(again)
        assert ran == ["exact", "int8, int4"]  # exact is what it is compared with
    with pytest.raises(SystemExit, match=r"exact.json is of a run with other settings"):
        zeropp_loss.main([*again, "--model", "smollm2"])
    _leave("int8, int4", _settings("--steps", "25", "--batch", "4"))
    with pytest.raises(SystemExit, match=r"int8_int4.json is of a run with other settings"):
        zeropp_loss.main(again)


def test_models_have_folders_of_their_own() -> None:
    folders = {zeropp_loss._arguments(["--model", model]).out for model in ("gpt", "smollm2")}
    assert len(folders) == 2
