"""The table and the plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from benchmarks.compare.figures import FLOOR, Figures

_OURS, _PEER, _PALE = "#2563eb", "#94a3b8", "#475569"


def table(figures: Sequence[Figures], *, title: str, unit: str, baseline: str) -> Table:
    """One line for each contender; one that failed says why."""
    shown = Table(title=title, caption=CAPTION, caption_justify="left")
    shown.add_column("contender")
    for name in columns(unit, baseline):
        shown.add_column(name, justify="right")
    for one in figures:
        name = Text(one.contender, style="bold" if is_ours(one.contender) else "")
        if one.failure:
            shown.add_row(name, Text("FAILED", style="bold red"))
        else:
            shown.add_row(name, *cells(one))
    return shown


CAPTION = (
    "step: median on the slowest rank, ± half the spread of rounds · exposed: step less compute · "
    "peak, rest: allocator bytes within a step and between steps · sent: per rank and step, by the "
    "counters of the interface · /formula: over what the ZeRO stage has to send · least: what that "
    "takes at the measured goodput · first: from the plain model to the end of step one"
)


def columns(unit: str, baseline: str) -> list[str]:
    """Headings after the name."""
    return [
        *("step ms", f"× {baseline}", f"{unit}/s", "exposed ms", "peak MB", "rest MB"),
        *("sent MB", "/formula", "least ms", "first s", "losses"),
    ]


def cells(one: Figures) -> list[str]:
    """The figures as text; a dash where nothing was measured."""
    step = _number(one.step_ms, ".1f")
    if one.step_ms and one.spread_ms:
        step += f" ± {one.spread_ms / 2:.1f}"
    losses = "agree" if one.compared else "–"
    if one.disagreement is not None:
        losses = f"DIFFER by {one.disagreement:.1e}"
    return [
        step,
        _number(one.ratio, ".2f"),
        _number(one.per_second, ",.0f"),
        _number(one.exposed_ms, ".1f"),
        _number(one.peak_bytes, ".1f", 1e6),
        _number(one.rest_bytes, ".1f", 1e6),
        _number(one.wire_bytes, ".1f", 1e6),
        _number(one.wire_ratio, ".2f"),
        _number(one.least_ms, ".1f"),
        _number(one.first_s, ".1f"),
        losses,
    ]


def failures(figures: Sequence[Figures]) -> list[str]:
    """Who failed, and why."""
    return [f"{one.contender} FAILED: {one.failure}" for one in figures if one.failure]


def markdown(figures: Sequence[Figures], *, unit: str, baseline: str) -> str:
    """The table for a page."""
    headings = ["contender", *columns(unit, baseline)]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)]]
    for one in figures:
        rest = ["FAILED", *[""] * (len(headings) - 2)] if one.failure else cells(one)
        lines.append([f"`{one.contender}`", *rest])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def plot(figures: Sequence[Figures], path: Path, title: str) -> None:
    """Bars of step time, with the floor as a line that they cannot pass."""
    # Only those who plot need matplotlib.
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    bars = [one for one in figures if one.contender != FLOOR]
    floor = next((one.step_ms for one in figures if one.contender == FLOOR), None)
    figure, axes = pyplot.subplots(figsize=(8, 0.8 + 0.36 * len(bars)), layout="constrained")
    for place, one in enumerate(reversed(bars)):
        if one.step_ms is None:
            axes.text(0, place, " failed", va="center", color=_PALE, style="italic")
            continue
        axes.barh(place, one.step_ms, 0.66, color=_OURS if is_ours(one.contender) else _PEER)
        ratio = f"  {one.ratio:.2f}×" if one.ratio else ""
        axes.text(one.step_ms, place, f" {one.step_ms:.0f}{ratio}", va="center", color=_PALE)
    if floor:
        axes.axvline(floor, color="#111827", linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"compute alone: {floor:.0f}",
            (floor, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=_PALE,
        )
    axes.set_yticks(range(len(bars)), [one.contender for one in reversed(bars)])
    axes.set_xlabel("milliseconds per step (shorter is better)")
    axes.set_title(title, loc="left", fontsize=10, pad=18)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.16)
    axes.set_ylim(-0.6, len(bars) - 0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def is_ours(name: str) -> bool:
    """Whether a contender is zerofx."""
    return name.startswith("zero")


def _number(value: float | None, form: str, unit: float = 1.0) -> str:
    return "–" if value is None else format(value / unit, form)
