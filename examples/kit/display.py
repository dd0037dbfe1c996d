"""What a person sees of a run: a progress bar while it trains, a picture of it afterwards."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from kit.world import GIB, World

INK, ACCENT, MUTED = "#1f2933", "#d1495b", "#9fb3c8"


class Display:
    """Reports training to the terminal. Ranks other than the first stay silent."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.console = Console(quiet=not world.leads, highlight=False)
        self._bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
            transient=False,
        )
        self._task = self._bar.add_task("", total=None, note="", visible=False)
        self._clock = 0.0

    def title(self, text: str, facts: dict[str, str]) -> None:
        """The heading of the run and what it runs on."""
        self.console.rule(f"[bold]{text}")
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(f"[dim]{name}", value)
        self.console.print(table)

    @contextlib.contextmanager
    def phase(self, text: str) -> Iterator[None]:
        """Show what is going on while there is nothing to count, and how long it took."""
        started = time.perf_counter()
        with self.console.status(text):
            yield
        self.console.print(f"[dim]{text}: {time.perf_counter() - started:.1f} s")

    @contextlib.contextmanager
    def steps(self, done: int, total: int) -> Iterator[None]:
        """Show the bar while the block trains from step `done` to `total`."""
        note = "compiling the training step …"
        self._bar.update(self._task, completed=done, total=total, note=note, visible=True)
        self._clock = time.perf_counter()
        with self._bar:
            yield

    def step(self, number: int, loss: float, tokens: int, memory_bytes: float) -> None:
        """One finished step of all ranks: mean loss, tokens seen, memory of the fullest rank."""
        now = time.perf_counter()
        speed = tokens / (now - self._clock)
        self._clock = now
        gib = memory_bytes / GIB
        note = f"loss [bold]{loss:.3f}[/]  {speed:,.0f} tok/s  {gib:.2f} GiB/rank"
        self._bar.update(self._task, completed=number, note=note)
        if not self.console.is_terminal:
            self.console.print(f"step {number:4d}  {note}")

    def result(self, before: float, after: float) -> None:
        """The verdict: held-out loss before and after training."""
        colour = "green" if after < before else "red"
        self.console.print(f"held-out loss  [bold]{before:.4f}[/] → [bold {colour}]{after:.4f}[/]")

    def sample(self, prompt: str, continuation: str) -> None:
        """What the model makes of a prompt."""
        self.console.print(Text(prompt, "dim"), Text(continuation, "bold"), sep="")


def draw_losses(path: Path, losses: list[float], before: float, after: float, title: str) -> str:
    """Draw the loss of every step, its trend, and the held-out loss at both ends; say where."""
    try:
        import matplotlib
    except ImportError:
        return "no loss curve: matplotlib is not installed"

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = range(1, len(losses) + 1)
    trend = [losses[0]]
    for loss in losses[1:]:
        trend.append(0.85 * trend[-1] + 0.15 * loss)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes.plot(steps, losses, color=MUTED, linewidth=1, label="training loss, each step")
    axes.plot(steps, trend, color=INK, linewidth=2.2, label="training loss, trend")
    ends = ([0, len(losses)], [before, after])
    axes.plot(*ends, "o--", color=ACCENT, linewidth=1.2, markersize=7, label="held-out loss")
    for x, loss, side in zip(*ends, ("left", "right"), strict=True):
        axes.annotate(
            f"{loss:.3f}",
            (x, loss),
            xytext=(0, 9),
            textcoords="offset points",
            ha=side,
            color=ACCENT,
            weight="bold",
        )
    axes.set_title(title, loc="left", color=INK, weight="bold")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross entropy, nats per token")
    axes.grid(axis="y", color="#e4e7eb")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02, y=0.12)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return f"loss curve: {path}"
