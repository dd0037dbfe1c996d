"""From outcomes to figures, tables and plots."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import stages
from benchmarks.compare.contenders import CONTENDERS
from benchmarks.compare.display import cells, markdown, plot, table
from benchmarks.compare.figures import formula_bytes, loss_differences, summarize
from benchmarks.compare.trial import Outcome


def _outcome(name: str, step_ms: float = 0.0, **found: object) -> Outcome:
    return Outcome(name, step_ms=step_ms, num_params=1000, num_units=256, **found)  # type: ignore


OUTCOMES = [
    _outcome("compute", peak_bytes=900),
    _outcome("zero3", peak_bytes=700, rest_bytes=600),
    _outcome("compute", 100, losses=[2.0, 9.0]),
    _outcome("zero3", 150, losses=[2.0, 1.5], wire_bytes=6000, first_s=3),
    _outcome("fsdp2", failure="RuntimeError: no"),
    _outcome("compute", 120, losses=[2.0, 9.0]),
    _outcome("zero3", 170, losses=[2.0, 1.5], wire_bytes=6000, first_s=5),
]


def test_the_picture_of_the_stages_is_what_the_formulas_say() -> None:
    image = Path(__file__).parents[2] / "docs" / "images" / "stages.svg"
    assert image.read_text(encoding="utf-8") == stages.draw()
    assert [sum(stages.held(stage).values()) for stage in range(4)] == [16, 9, 5.5, 2]


def test_medians_ratios_and_formulas() -> None:
    floor, zero3, fsdp2 = summarize(OUTCOMES, ranks=2, nodes=2, goodput=1e6)
    assert (floor.step_ms, floor.ratio, floor.exposed_ms) == (110, 1, 0)
    assert (zero3.step_ms, zero3.spread_ms, zero3.exposed_ms) == (160, 20, 50)
    assert zero3.ratio == pytest.approx(160 / 110)
    assert zero3.per_second == pytest.approx(1600)
    assert (zero3.peak_bytes, zero3.rest_bytes, zero3.first_s) == (700, 600, 4)
    assert zero3.wire_ratio == 1
    assert zero3.least_ms == pytest.approx(6)
    assert zero3.disagreement is None
    assert fsdp2.failure == "RuntimeError: no"
    assert fsdp2.step_ms is None


def test_another_baseline() -> None:
    floor, zero3, _ = summarize(OUTCOMES, ranks=2, nodes=2, baseline="zero3")
    assert floor.ratio == pytest.approx(110 / 160)
    assert zero3.ratio == 1


def test_ratios_are_of_rounds_that_both_ran() -> None:
    steps = [("compute", 100), ("zero3", 150), ("compute", 200), ("zero3", 300), ("compute", 210)]
    _, zero3 = summarize([_outcome(*each) for each in steps], ranks=2, nodes=2)
    assert (zero3.ratio, zero3.exposed_ms) == (1.5, 75)
    outcomes = [_outcome(*each) for each in steps[:2]]
    outcomes += [_outcome("compute", failure="OOM"), _outcome("zero3", 300)]
    floor, zero3 = summarize(outcomes, ranks=2, nodes=2)
    assert floor.failure and zero3.step_ms == 225
    assert zero3.ratio is zero3.exposed_ms is None


def test_ranks_of_a_node_share_its_link() -> None:
    _, zero3, _ = summarize(OUTCOMES, ranks=4, nodes=2, goodput=1e6)
    assert zero3.wire_ratio == 2
    assert zero3.least_ms == pytest.approx(6)


def test_formula() -> None:
    assert formula_bytes(3, 1000, 4) == 9000
    assert formula_bytes(CONTENDERS["compute"].traffic, 1000, 4) == 0


def test_only_the_first_loss_of_the_floor_counts() -> None:
    grouped = {
        "compute": [_outcome("compute", losses=[2.0, 7.0])],
        "ddp": [_outcome("ddp", losses=[2.0, 1.0])],
        "zero3": [_outcome("zero3", losses=[2.0, 1.0])],
        "fsdp2": [_outcome("fsdp2", losses=[2.0, 1.1])],
    }
    assert loss_differences(grouped) == pytest.approx(
        {"compute": 0, "ddp": 0, "zero3": 0, "fsdp2": 0.1}
    )


def test_a_loss_that_is_no_number_disagrees() -> None:
    losses = ([1.0, 1.0], [1.0, 1.0], [1.0, math.nan])
    names = ("ddp", "zero0", "zero3")
    outcomes = [_outcome(name, 1, losses=one) for name, one in zip(names, losses, strict=True)]
    assert [one.disagreement for one in summarize(outcomes, ranks=2, nodes=2)] == [
        None,
        None,
        math.inf,
    ]


def test_losses_without_others_agree_with_nobody() -> None:
    figures = summarize(
        [*OUTCOMES[:2], _outcome("zero1", 1, losses=[4.0])], ranks=2, nodes=2
    )  # two of which only memory was measured
    text = markdown(figures, unit="tokens", baseline="compute")
    assert "agree" not in text and "DIFFER" not in text
    (_, zero3, _) = summarize(OUTCOMES, ranks=2, nodes=2)
    assert cells(zero3)[-1] == "agree"


def test_failures_and_disagreement_are_shown(tmp_path: Path) -> None:
    figures = summarize([*OUTCOMES[:6], _outcome("zero1", 1, losses=[4.0, 4.0])], ranks=2, nodes=2)
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(figures, title="gpt", unit="tokens", baseline="compute"))
    for text in (captured.get(), markdown(figures, unit="tokens", baseline="compute")):
        assert "FAILED" in text
        assert "DIFFER" in text
    pytest.importorskip("matplotlib")
    plot(figures, tmp_path / "new" / "steps.png", "gpt")
    assert (tmp_path / "new" / "steps.png").stat().st_size > 1000
