"""Run zerofx and its peers in turns, and print who takes how long, how much, and how many bytes.

    python -m benchmarks.compare                                    # all, on this machine
    python -m benchmarks.compare --contenders compute zero3 fsdp2_compile --rounds 5
    sudo -E python -m benchmarks.compare --hosts 2 --rate 1gbit     # over links of a given rate
    python -m benchmarks.compare --device cuda --ranks 8

On plain localhost bytes are those of `lo`, other programs' included; with `--hosts` each host is a
network namespace (`benchmarks.netlab`), and nothing but the ranks is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare.contenders import CONTENDERS
from benchmarks.compare.display import failures, markdown, plot, table
from benchmarks.compare.figures import FLOOR, Figures, summarize
from benchmarks.compare.rounds import Place, run_rounds
from benchmarks.compare.trial import Outcome, Trial
from benchmarks.compare.zoo import MODELS
from benchmarks.netlab import UNLIMITED, Lab, LabError

_PEERS = ("torch", "zerofx", "torchtitan", "deepspeed")


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--baseline", choices=list(CONTENDERS), default=FLOOR, help="what ratios are of")
    add("--model", choices=list(MODELS), default="gpt")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--ranks", type=int, help="on each host; by default 1 with --hosts, 2 without")
    add("--hosts", type=int, help="network namespaces; none: this machine's own network")
    add("--rate", default=UNLIMITED, help="of each host's link, such as 1gbit")
    add("--rounds", type=int, default=3, help="contenders take turns, medians are taken")
    add("--warmup", type=int, default=5, help="steps not timed; their losses are compared")
    add("--steps", type=int, default=20, help="steps timed in each round")
    add("--cold", action="store_true", help="an empty Inductor cache for every trial")
    add("--no-memory", action="store_true", help="leave out the trials that measure memory")
    add("--timeout", type=float, default=900.0, help="seconds for one trial")
    add("--json", type=Path, help="file for everything that was measured")
    add("--plot", type=Path, help="picture to write")
    add("--markdown", type=Path, help="table to write")
    add("--logs", type=Path, default=Path("runs/compare"), help="folder for what ranks print")
    args = parser.parse_args(argv)
    if args.rate != UNLIMITED and not args.hosts:
        parser.error("--rate needs --hosts: there is no link to hold to it")
    args.ranks = args.ranks or (1 if args.hosts else 2)
    for path in filter(None, (args.json, args.markdown, args.plot)):
        try:
            _try_to_write(path)
        except OSError as error:
            parser.error(f"{path} cannot be written: {error.strerror}")
    if args.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib")
    return args


def _try_to_write(path: Path) -> None:
    """Before hours of measuring, not behind them."""
    is_new = not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
    if is_new:
        path.unlink()


@contextlib.contextmanager
def place_of(args: argparse.Namespace) -> Iterator[tuple[Place, float | None]]:
    """Where ranks run, and the goodput of its links where it has some."""
    rest = {"logs": args.logs, "timeout": args.timeout, "cold": args.cold}
    if not args.hosts:
        yield Place(args.ranks, None, **rest), None
        return
    with Lab(args.hosts, args.rate).up() as lab:
        yield Place(args.ranks, lab, **rest), lab.goodput()


def trials_of(args: argparse.Namespace, interface: str) -> list[Trial]:
    """What each contender has to do in a round."""
    kinds = (False,) if args.no_memory else (True, False)
    return [
        Trial(name, args.model, args.device, args.warmup, args.steps, 2, interface, memory)
        for memory in kinds
        for name in args.contenders
    ]


def machine() -> dict[str, Any]:
    """What figures depend on besides the code."""
    versions: dict[str, str] = {}
    for name in _PEERS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "python": platform.python_version(),
        "versions": versions,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, write what was asked for, and print; exit with 1 if nobody ran."""
    args = parse(argv)
    console, about = Console(), machine()
    if not console.is_terminal:
        console = Console(width=160)  # a file has no edge

    outcomes: list[Outcome] = []

    def report(trial: Trial, outcome: Outcome) -> None:
        outcomes.append(outcome)
        what = "memory" if trial.memory else f"{outcome.step_ms:.1f} ms"
        console.print(f"[dim]{trial.contender}: {outcome.failure or what}", highlight=False)

    try:
        with place_of(args) as (place, goodput):
            trials = trials_of(args, place.interface_for(args.device))
            try:
                run_rounds(trials, args.rounds, place, report)
            except KeyboardInterrupt:
                console.print("[red]interrupted: what follows is of the trials before that")
    except (LabError, ValueError) as error:
        raise SystemExit(f"compare: {error}") from None
    about |= {"load_after": os.getloadavg(), "goodput": goodput, "world": place.world}
    figures = summarize(
        outcomes,
        ranks=place.world,
        nodes=args.hosts or place.world,
        baseline=args.baseline,
        goodput=goodput,
    )
    if args.json:
        options = {name: str(value) for name, value in vars(args).items()}
        found = {"about": about, "options": options}
        found["figures"] = [dataclasses.asdict(one) for one in figures]
        found["outcomes"] = [dataclasses.asdict(one) for one in outcomes]
        args.json.write_text(json.dumps(found, indent=1))
    show(args, console, figures, headline(args, place, goodput))
    if all(one.failure for one in figures):
        raise SystemExit(1)


def headline(args: argparse.Namespace, place: Place, goodput: float | None) -> str:
    """What was run, where."""
    size = sum(param.numel() for param in MODELS[args.model]().parameters()) / 1e6
    link = "localhost"
    if place.lab:
        link = f"{place.lab.hosts} hosts, {place.lab.rate}"
    if goodput:
        link += f", goodput {goodput / 1e6:.0f} MB/s"
    return f"{args.model}, {size:.1f} M parameters · {place.world} ranks, {args.device} · {link}"


def show(
    args: argparse.Namespace, console: Console, figures: Sequence[Figures], title: str
) -> None:
    """Print the table, and write it and the plot where asked to."""
    words = {"unit": MODELS[args.model].unit, "baseline": args.baseline}
    console.print(table(figures, title=title, **words))
    for line in failures(figures):
        console.print(line, style="red", highlight=False)
    if args.plot:
        plot(figures, args.plot, title)
    if args.markdown:
        text = "\n".join([markdown(figures, **words), "", *failures(figures)])
        args.markdown.write_text(f"{title}\n\n{text.strip()}\n")


if __name__ == "__main__":
    main()
