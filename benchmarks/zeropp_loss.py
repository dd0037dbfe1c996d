"""Held-out loss of a model in training: with numbers, and with ZeRO++'s codes.

    python -m benchmarks.zeropp_loss --out figures --picture docs/images/zeropp_loss.png
    python -m benchmarks.zeropp_loss --model smollm2 --inner inductor --ranks 1 --batch 1

Ranks on two nodes train on Shakespeare, once for each contender, from the same weights on the same
data: the character GPT of `examples/quickstart.py` from nothing, or SmolLM2-135M from its
pretrained weights. Contenders whose file is in `--out` are not run again; files of runs with other
settings are refused. `exact`, with which all are compared, always takes part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.launch import run_all, torchrun

ROOT = Path(__file__).parents[1]
_ALL_THREE = {"quantize_weights": "int8", "secondary_shards": True}
CONTENDERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8, int8": {**_ALL_THREE, "quantize_gradients": "int8"},
    "int8, int4": {**_ALL_THREE, "quantize_gradients": ("int8", "int4")},
    "int4, int4": {**_ALL_THREE, "quantize_gradients": "int4"},
    "int4, int4, feedback": {**_ALL_THREE, "quantize_gradients": "int4.feedback"},
    "all int4": {
        **_ALL_THREE,
        "quantize_weights": "int4x64",
        "quantize_gradients": "int4",
        "quantize_exact": "*norm*",
    },
}
"""Options by name: codecs of gradients inside a node, and between nodes; int8 weights, hpZ.

`all int4`: weights, too, and those of embeddings.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing; then print and draw everything."""
    args = _arguments(argv)
    if args.contender is not None:
        _train(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    search = [str(ROOT), str(ROOT / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(search), "OMP_NUM_THREADS": "1"}
    for name in args.contenders:
        _refuse_others(args, _file(args, name))
    for name in args.contenders:
        if not _file(args, name).exists():
            command = ["-m", "benchmarks.zeropp_loss", *(argv or sys.argv[1:])]
            code = run_all([torchrun([*command, "--contender", name], 2 * args.ranks)], environment)
            if code:
                raise SystemExit(f"{name} failed with exit code {code}")
    losses = {name: json.loads(_file(args, name).read_text())["losses"] for name in args.contenders}
    print(table(losses))
    if args.picture is not None:
        draw(losses, args.picture)


def table(losses: dict[str, dict[str, float]]) -> str:
    """Markdown: the held-out loss at each measured step, and how far the last is from exact."""
    steps = list(losses["exact"])
    rows = [["gradients", *steps, "last, to exact"], ["---", *["---:"] * (len(steps) + 1)]]
    for name, found in losses.items():
        far = found[steps[-1]] / losses["exact"][steps[-1]] - 1
        rows.append([name, *(f"{found[step]:.3f}" for step in steps), f"{far:+.2%}"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(losses: dict[str, dict[str, float]], path: Path) -> None:
    """Losses, and below them their distance from the exact run, in per cent."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    for name, found in losses.items():
        steps = [int(step) for step in found]
        above.plot(steps, list(found.values()), label=name)
        exact = losses["exact"].values()
        below.plot(steps, [100 * (a / b - 1) for a, b in zip(found.values(), exact, strict=True)])
    above.set_ylabel("held-out loss")
    above.legend(title="gradients inside, across")
    below.axhspan(-1, 1, alpha=0.1)
    below.set(xlabel="step", ylabel="to exact, %")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _train(args: argparse.Namespace) -> None:
    """One rank of one contender."""
    from kit.corpus import Windows, held_out_batches
    from kit.world import join

    with join() as world:
        torch.manual_seed(0)
        model, train, kept, rate = (_gpt if args.model == "gpt" else _smollm2)(args, world)
        options = {"inner": args.inner, "ranks_per_node": args.ranks, **CONTENDERS[args.contender]}
        if args.ranks == 1:  # secondary shards lie between ranks of a node, and change no number
            options.pop("secondary_shards", None)
        compiled = torch.compile(model, backend="zero3", options=options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        shape = {"length": args.length, "batch": args.batch}
        place = {"rank": world.rank, "world": world.size}
        stream = Windows(train, seed=0, **shape, **place)
        held_out = held_out_batches(kept, windows=args.windows, **shape, **place)

        def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
            found = compiled(tokens)
            logits = found if isinstance(found, Tensor) else found.logits
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

        @torch.no_grad()
        def evaluate() -> float:
            mine = sum(loss_of(*batch).item() for batch in held_out) / len(held_out)
            return world.gather(mine).mean().item()

        losses = {0: evaluate()}
        for number in range(1, args.steps + 1):
            loss_of(*stream.next()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if number % args.every == 0:
                losses[number] = evaluate()
                if world.leads:
                    print(f"{args.contender}: step {number}, loss {losses[number]:.4f}", flush=True)
        if world.leads:
            size = sum(param.numel() for param in model.parameters())
            found = {"contender": args.contender, "num_params": size, "losses": losses}
            found["settings"] = _settings(args)
            _file(args, args.contender).write_text(json.dumps(found, indent=1))


def _gpt(args: argparse.Namespace, world: Any) -> tuple[nn.Module, Tensor, Tensor, float]:
    """Model, tokens to train on and to measure with, learning rate."""
    from kit.assets import default_cache
    from kit.corpus import python_manual, shakespeare
    from quickstart import GPT, Characters

    text = python_manual() if args.tiny else shakespeare(default_cache())
    characters = Characters("".join(text.train + text.held_out))
    train, held_out = (characters.encode("".join(each)) for each in (text.train, text.held_out))
    model = GPT(len(characters.alphabet), args.length, args.width, args.depth)
    return model, train, held_out, 2e-3


def _smollm2(args: argparse.Namespace, world: Any) -> tuple[nn.Module, Tensor, Tensor, float]:
    """The same of a pretrained model."""
    from kit import smollm2
    from kit.assets import default_cache

    task = smollm2.load_on_all(world, default_cache(), tiny=args.tiny)
    return task.model, task.train, task.held_out, 1e-4


def _file(args: argparse.Namespace, name: str) -> Path:
    return args.out / f"{name.replace(', ', '_')}.json"


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What losses depend on."""
    others = ("out", "picture", "contender", "contenders")
    return {name: value for name, value in vars(args).items() if name not in others}


def _refuse_others(args: argparse.Namespace, file: Path) -> None:
    if file.exists() and json.loads(file.read_text()).get("settings") != _settings(args):
        raise SystemExit(
            f"{file} is of a run with other settings: delete it, or give another --out"
        )


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", choices=["gpt", "smollm2"], default="gpt")
    parser.add_argument("--inner", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--ranks", type=int, default=2, help="on each of the two nodes")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between held-out losses")
    parser.add_argument("--windows", type=int, default=256, help="held out, of all ranks")
    parser.add_argument("--length", type=int, default=64, help="characters, or tokens, in a window")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--width", type=int, default=128, help="of the GPT")
    parser.add_argument("--depth", type=int, default=4, help="of the GPT")
    parser.add_argument("--out", type=Path, help="by default runs/zeropp_loss/MODEL")
    parser.add_argument("--picture", type=Path, help="draw it there")
    parser.add_argument(
        "--tiny", action="store_true", help="no download: Python's manual; SmolLM2 small"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--contender", choices=CONTENDERS, help="be one of its ranks")
    args = parser.parse_args(argv)
    args.out = args.out or Path("runs/zeropp_loss", args.model)
    args.contenders = list(dict.fromkeys(["exact", *args.contenders]))
    return args


if __name__ == "__main__":
    main()
