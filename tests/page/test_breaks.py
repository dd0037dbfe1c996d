"""Graph breaks: found where Dynamo ends a graph, told with the user's line and a remedy."""

from __future__ import annotations

import json
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import Tensor, nn

from tests.hard.pair import EAGER, draw
from tests.page.browser import Tab
from tests.ranks import run_ranks
from zerofx.frontend.breaks import read_break


class Talks(nn.Module):
    """A model with a break in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()  # the line that breaks
        return self.second(x).sum()


def _train(folder: str) -> None:
    torch.manual_seed(0)
    run: Any = torch.compile(Talks(), backend="zero3", options={**EAGER, "dump": folder})
    run(draw(2, 4)).backward()


def test_a_break_is_told_with_its_line(tmp_path: Path, tab: Tab) -> None:
    run_ranks(2, _train, str(tmp_path))
    reports = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("graph*/report.json"))]
    before, behind = (report["break"] for report in reports)
    lines = Path(__file__).read_text().splitlines()
    assert behind is None
    assert lines[before["line"] - 1].strip() == before["code"] != ""
    assert before["file"].endswith("tests/page/test_breaks.py") and before["function"] == "forward"
    assert "graph_break()" in before["remedies"][0] and before["reason"]
    tab.open(tmp_path / "report.html")
    assert tab.errors == []
    shown = str(tab.run("document.getElementById('breaks').innerText"))
    assert f"test_breaks.py:{before['line']}" in shown and before["remedies"][0] in shown
    assert tab.run("document.querySelectorAll('#graphs button').length") == 2
    tab.run("document.querySelectorAll('#graphs button')[1].click()")
    title = str(tab.run("document.title"))
    assert title.startswith(f"zerofx report: graph {reports[1]['graph']}")
    assert tab.errors == []


WORDS = """Unsupported context manager
  Explanation: Dynamo does not know how to enter it.
  Hint: Move it out of the function.
  Hint: Please report an issue to PyTorch.

  Developer debug context: attempted to jump
"""


def test_dynamos_words_are_read() -> None:
    frame = FrameSummary("/x/site-packages/pkg/model.py", 7, "forward", line="  if y.sum() > 0:")
    found = read_break(WORDS, [frame])
    assert found.remedies == ("Move it out of the function.",)
    assert (found.file, found.line, found.code) == ("pkg/model.py", 7, "if y.sum() > 0:")
    assert found.reason.startswith("Unsupported context manager. Dynamo does not know")


def test_words_without_hints_get_a_remedy_of_ours() -> None:
    found = read_break("odd thing", [])
    assert found.reason == "odd thing" and found.file == "" and found.line == 0
    assert "fullgraph=True" in found.remedies[0]
    branch = read_break("Data-dependent branching\n  Hint: …", [])
    assert branch.reason == "a branch on a tensor's values" and "torch.where" in branch.remedies[0]
