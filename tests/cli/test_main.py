"""The command line as its users meet it: exit codes, errors, JSON, completion."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from zerofx.cli import units
from zerofx.cli.arguments import COMMANDS
from zerofx.cli.command import Answer
from zerofx.cli.completion import script_for
from zerofx.cli.main import build_parser, main
from zerofx.cli.targets import find_target
from zerofx.errors import ConfigError, UnsupportedError
from zerofx.torch_private import fake_mode


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan"])
    assert left.value.code == 2
    with pytest.raises(SystemExit) as left:
        main(["plan", "llama", "--memory", "lots"])
    assert left.value.code == 2 and "80GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plan", "no.such.module:Model"], "cannot be imported"),
        (["plan", "tests.models:nothing"], "cannot be imported"),
        (["plan", "lama"], "did you mean 'llama'?"),
        (["plan", "llama(num_layers=3)"], "has no field 'num_layers'"),
        (["plan", "llama(3)"], "key=value"),
        (["plan", "llama", "--input", "int64[N]"], "B for the batch size"),
        (["plan", "llama", "--world-size", "5000"], "use 1 to 4096"),
        (["plan", "llama", "--length", "0"], "--length 0 is not allowed"),
    ],
    ids=lambda value: " ".join(value[1:]) if isinstance(value, list) else "",
)
def test_errors_are_one_block_with_a_remedy(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    assert main(argv) == 2
    text = capsys.readouterr().err
    assert text.startswith("zerofx plan: ") and said in text and "Remedy: " in text
    assert "Traceback" not in text
    main([*argv, "--debug"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "{path} cannot be read as JSON: "),
        ("[1]", "{path} holds a JSON list, no object"),
        ("{}", "has model_type None"),
        (None, "folder {folder} has no config.json"),
    ],
)
def test_configurations_that_are_none(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["plan", str(tmp_path)]) == 2
    found = capsys.readouterr().err
    assert said.format(path=path, folder=tmp_path) in found and "\nRemedy: " in found


def test_a_module_wants_a_factory(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["plan", "tests.models"]) == 2
    assert "Remedy: write tests.models:Factory" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_option(shell: str) -> None:
    script = script_for(build_parser(), shell)
    for word in (
        "plan",
        "completion",
        "--world-size",
        "--precision",
        "fp32 mixed",
        "explain",
        "--why",
    ):
        assert word in script
    assert ("bashcompinit" in script) == (shell == "zsh")


def test_completion_completes(tmp_path: Path) -> None:
    script = tmp_path / "complete.bash"
    script.write_text(script_for(build_parser(), "bash"))
    for typed, wanted in [(["p"], "plan"), (["plan", "--wor"], "--world-size")]:
        words = " ".join(f"'{word}'" for word in ["zerofx", *typed])
        line = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _zerofx; "
        done = subprocess.run(
            ["bash", "-c", line + 'echo "${COMPREPLY[@]}"'], capture_output=True, text=True
        )
        assert done.stdout.split() == [wanted], done.stderr


def test_every_command_documents_itself() -> None:
    assert all(command.summary and command.name for command in COMMANDS)


@pytest.mark.parametrize(
    ("text", "found"),
    [("80GB", 80e9), ("80GiB", 80 * 2**30), ("24e9", 24e9), ("16 GiB", 16 * 2**30), ("512", 512)],
)
def test_sizes(text: str, found: float) -> None:
    assert units.size(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("25GB/s", 25e9),
        ("25gB/s", 25e9),
        ("25GBps", 25e9),
        ("10 GiB/s", 10 * 2**30),
        ("2Gbytes/s", 2e9),
        ("1.5e9", 1.5e9),
        ("100gbit", 12.5e9),
        ("12.5Gbit/s", 1.5625e9),
        ("100GBIT/S", 12.5e9),
        ("100Gbps", 12.5e9),
        ("100gb/s", 12.5e9),
        ("10Gb", 1.25e9),
    ],
)
def test_rates(text: str, found: float) -> None:
    assert units.rate(text) == found


def test_what_is_no_number_is_refused() -> None:
    for parse, text in [
        (units.size, "GB"),
        (units.size, "1e999"),
        (units.rate, "fast"),
        (units.rate, "0GB/s"),
        (units.speed, "1.2.3T"),
        (units.speed, "0"),
        (units.latency, "-1"),
        (units.latency, "nan"),
        (units.latency, "soon"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


def test_numbers_are_shown_as_in_the_paper() -> None:
    assert units.show_bytes(31.4e9) == "31.4 GB" and units.show_bytes(120e9) == "120 GB"
    assert units.show_count(7.5e9) == "7.50 B" and units.show_seconds(0.0123) == "12.3 ms"
    assert units.show_bytes(999.4e6) == "999 MB" and units.show_bytes(999.6e6) == "1.00 GB"
    assert units.show_rate(25e9) == "25.0 GB/s" and units.show_rate(math.inf) == "no limit"


def test_data_are_json_where_a_link_has_no_limit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = Answer({"links": [{"rate": math.inf}], "sizes": (1, 2.5)}, ())
    monkeypatch.setattr("zerofx.cli.plan.run", lambda args, progress: answer)
    assert main(["plan", "any", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"links": [{"rate": None}], "sizes": [1, 2.5]}


def test_a_configuration_on_disk_and_a_factory_with_arguments(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with fake_mode():
        for path in (tmp_path, tmp_path / "config.json"):
            model = find_target(f"{path}(num_hidden_layers=1)", []).build()
            assert len(model.get_submodule("model.layers")._modules) == 1
        made = find_target("benchmarks.gpt:Gpt(width=64, depth=1)", [])
        assert sum(p.numel() for p in made.build().parameters()) == 1024 * 64 + 12 * 64**2 + 3 * 64
        args, kwargs = find_target("benchmarks.gpt:Gpt", ["x=float32[B,3]"]).inputs(5, 7)
    assert args == () and kwargs["x"].shape == (5, 3)


def test_a_factory_must_return_a_module() -> None:
    with pytest.raises(ConfigError, match=r"no nn\.Module"):
        find_target("json:loads(s='1')", []).build()
    with pytest.raises(ConfigError, match="is a module, no factory"):
        find_target("benchmarks:gpt", [])


def test_arguments_that_a_factory_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'wdith'") as refused:
        find_target("benchmarks.gpt:Gpt(wdith=64)", [])
    assert "width" in refused.value.remedy


def test_whoever_closes_the_pipe_has_read_enough() -> None:
    command = [sys.executable, "-m", "zerofx", "completion", "bash"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()
        assert running.wait(60) == 0
        assert running.stderr.read() == b""


def test_text_of_the_user_is_printed_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However narrow the terminal is; nor is anything taken for emoji or markup."""
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("tensor", "stage", box=None, show_edge=False)
    name = "p[bold]x.z[:b:2].a_rather_long_module_name"
    for column in table.columns:
        column.no_wrap = True
    table.add_row(name, "55.4 kB")
    answer = Answer({}, (f"x = z[:b:2]  {name}", table, "end"))
    monkeypatch.setattr("zerofx.cli.plan.run", lambda args, progress: answer)
    assert main(["plan", "any"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["x", "=", "z[:b:2]", name],
        ["tensor", "stage"],
        [name, "55.4", "kB"],
        ["end"],
    ]


def test_what_dynamo_adds_to_an_error_does_not_follow_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(text: str, specs: list[str]) -> None:
        error = UnsupportedError("no", "do so")
        error.args = (f"{error}\n\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace\n",)
        raise error

    monkeypatch.setattr("zerofx.cli.plan.find_target", refuse)
    assert main(["plan", "any"]) == 1
    assert capsys.readouterr().err == "zerofx plan: no\nRemedy: do so\n"
