"""Targets: what is wrong with one is said before anything is traced, as wrong usage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import Tensor, nn

from zerofx.cli.main import main
from zerofx.cli.targets import find_target
from zerofx.errors import ConfigError
from zerofx.torch_private import fake_mode

HERE = "tests.cli.test_targets"


class Two(nn.Module):
    """Takes two inputs."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        if width % 8:
            raise ValueError(f"{width} is no multiple of 8")
        self.left, self.right = nn.Linear(width, width), nn.Linear(32, width)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.left(a) + self.right(b)).sum()


ONE, OTHER = ["--input", "float32[B,64]"], ["--input", "float32[B,32]"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([":Two"], "names no module"),
        ([".a:Two"], "names no module"),
        ([f"{HERE}:Two", "--input", "float32[B,²]"], "input 'float32[B,²]' cannot be read"),
        ([f"{HERE}:Two", *ONE], "missing a required argument: 'b'"),
        ([f"{HERE}:Two", *ONE, "--input", "c=float32[B,32]"], "(a: "),
        ([f"{HERE}:Two(width=63)", *ONE, *OTHER], f"{__file__}:25: 63 is no multiple of 8"),
        ([f"{HERE}:Two", *ONE, *OTHER, "--length", "9"], "leave --length out, or write S into"),
        ([f"{HERE}:Two", "--input", "float32[4,64]", "--batch", "4"], "no input of target"),
        (["--secondary-shards", f"{HERE}:Two", *ONE], "Name the target before it"),
    ],
    ids=str,
)
def test_wrong_usage_is_exit_code_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code: object
    try:
        code = main(["plan", *argv])
    except SystemExit as left:
        code = left.code
    printed = capsys.readouterr().err
    assert code == 2 and said in printed
    assert "Remedy: " in printed or "usage: " in printed


def test_explain_refuses_sizes_that_change_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--length", "9", *ONE, *OTHER, f"{HERE}:Two"]) == 2
    assert "--length 9: no input" in capsys.readouterr().err


def test_a_module_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_at_import.py").write_text("import json\njson.loads('{')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"JSONDecodeError at .*fails_at_import\.py:2"):
        find_target("fails_at_import:Model", [])


def test_paths_may_have_parentheses(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 50}
    path = tmp_path / "config (1).json"
    path.write_text(json.dumps(fields))
    with fake_mode():
        for text, depth in ((f"{path}", 2), (f"{path} (num_hidden_layers=1)", 1)):
            model = find_target(text, []).build()
            assert len(model.get_submodule("model.layers")._modules) == depth
