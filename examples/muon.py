"""Train a small character GPT with Muon, an optimizer that needs whole matrices.

    torchrun --nproc-per-node 2 examples/muon.py
    torchrun --nproc-per-node 2 examples/muon.py --adamw     # the same without Muon

Muon updates the matrices of the blocks, each whole on the rank that owns it; AdamW the rest.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from kit.corpus import Windows, python_manual
from kit.world import join
from quickstart import GPT, Characters
from torch import nn

from zerofx import OwnerOptimizer

LENGTH = 64


def main(argv: list[str] | None = None) -> None:
    """Train, and say what each rank holds of Muon's momentum."""
    args = parse_arguments(argv)
    with join() as world:
        text = "".join(python_manual().train)
        characters = Characters(text)
        place = {"rank": world.rank, "world": world.size}
        stream = Windows(characters.encode(text), length=LENGTH, batch=args.batch, seed=0, **place)
        torch.manual_seed(0)
        model = GPT(len(characters.alphabet), LENGTH, args.width, args.depth).to(world.device)
        optimizers = make_optimizers(model, args)
        compiled: Any = torch.compile(
            model, backend=f"zero{args.stage}", options={"inner": args.inner}
        )

        for number in range(1, args.steps + 1):
            tokens, targets = (part.to(world.device) for part in stream.next())
            loss = F.cross_entropy(compiled(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            average = world.gather(loss.item()).mean().item()
            if world.leads and number in (1, args.steps):
                print(f"step {number}: loss {average:.3f}")

        if not args.adamw:
            entries = optimizers[-1].state.values()
            held = [value.numel() for entry in entries for value in entry.values()]
            table = world.gather(len(held), sum(held)).int().tolist()
            if world.leads:
                for rank, (count, numel) in enumerate(table):
                    print(f"rank {rank} owns {count} matrices, {numel:,} elements")


def make_optimizers(model: GPT, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """AdamW for embeddings, norms and biases; Muon for the matrices of the blocks."""
    if args.adamw:
        return [torch.optim.AdamW(model.parameters(), lr=args.lr)]
    matrices = [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    mine = {id(matrix) for matrix in matrices}
    rest = [param for param in model.parameters() if id(param) not in mine]
    muon = OwnerOptimizer(matrices, torch.optim.Muon, lr=args.muon_lr)
    return [torch.optim.AdamW(rest, lr=args.lr), muon]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; its defaults take about a minute on two CPU cores."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--stage", type=int, choices=range(4), default=3, help="ZeRO stage")
    parser.add_argument("--inner", choices=("inductor", "eager"), default="inductor")
    parser.add_argument("--adamw", action="store_true", help="AdamW for all parameters")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16, help="windows per rank and step")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--muon-lr", type=float, default=0.02)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
